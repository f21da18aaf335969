#!/bin/sh
# Build the Dockerfile and run it, where there is no image registry: the base is a root file system of Debian's packages
# (debootstrap), the build is buildah's. The container then runs by chroot as its own user, on a read-only root, without
# a network of its own, and has to pass its health check and answer a request. Needs root, buildah and debootstrap.
#
#   MIRROR           where debootstrap gets Debian's packages; by default its own
#   BUILD_OPTIONS    more options of `buildah build`, such as volumes with wheels or certificates
set -eu
cd "$(dirname "$0")/.."
work=${WORK:-$(mktemp -d)}
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
port=18765

[ -d "$work/rootfs/usr" ] ||
	debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/rootfs" ${MIRROR:-} >/dev/null
base=$(buildah from scratch)
buildah add --quiet "$base" "$work/rootfs" / >/dev/null
buildah commit --quiet --rm "$base" usetta-base >/dev/null
# shellcheck disable=SC2086  # several options
buildah build --format docker --layers --build-arg BASE=localhost/usetta-base ${BUILD_OPTIONS:-} --tag usetta .

container=$(buildah from localhost/usetta)
root=$(buildah mount "$container")
test "$(buildah inspect --format '{{.OCIv1.Config.User}}' "$container")" = usetta

# The command, the environment and the health check are those of the image.
cat > "$work/run.py" <<'PYTHON'
import json, subprocess, sys
root, port = sys.argv[1:3]
config = json.load(sys.stdin)["Docker"]["config"]
env = ["env", "-i", *config["Env"]]
inside = ["chroot", "--userspec=usetta", root, *env]
check = [part.replace(":8000", f":{port}") for part in config["Healthcheck"]["Test"][1:]]
server = subprocess.Popen([*inside, *config["Entrypoint"], "--port", port], stdout=subprocess.DEVNULL)
try:
    import time
    for _ in range(120):
        if subprocess.run([*inside, *check], stderr=subprocess.DEVNULL).returncode == 0:
            break
        assert server.poll() is None, "the server has ended"
        time.sleep(1)
    else:
        sys.exit("not healthy after two minutes")
    ask = (
        "import json, time, urllib.request as u\n"
        f"base = 'http://127.0.0.1:{port}'\n"
        "for _ in range(120):\n"
        "    try: u.urlopen(base + '/readyz'); break\n"
        "    except OSError: time.sleep(1)\n"
        "image = 'iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEklEQVR42mP4X8EgJycHwkAWABt6A6Oa77sGAAAAAElFTkSuQmCC'\n"
        "body = json.dumps({'image': image, 'classes': ['cat', 'dog'], 'views': 2}).encode()\n"
        "sent = u.Request(base + '/v1/classify', body, {'content-type': 'application/json'})\n"
        "print('answer:', json.load(u.urlopen(sent, timeout=100))['label'])\n"
        "import os\n"
        "assert os.getuid() != 0\n"
        "try: open('/opt/usetta/written', 'w')\n"
        "except OSError as error: print('root is read-only:', error)\n"
        "else: raise SystemExit('the root can be written to')\n"
    )
    subprocess.run([*inside, "python3", "-c", ask], check=True)
finally:
    server.terminate()
    print("exit code of the server:", server.wait(30))
PYTHON
buildah inspect "$container" > "$work/inspect.json"
unshare --mount sh -eu -c '
	mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"
	mount -t tmpfs tmpfs "$1/tmp"
	mount -t proc proc "$1/proc" 2>/dev/null || true
	python3 "$2/run.py" "$1" "$3" < "$2/inspect.json"
' - "$root" "$work" "$port"
buildah rm "$container" >/dev/null
