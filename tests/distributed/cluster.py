"""A real Ray cluster on this machine: `ray start` for the head and for every further node."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NODE = ("--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000")

_ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
"""Workers import hands from here."""


class Cluster:
    """Nodes of one CPU each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{_free_port()}"
        port = self.address.rpartition(":")[2]
        self._start("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")

    def grow(self) -> None:
        """Let there be two nodes."""
        if len(self._nodes) < 2:
            self._start(f"--address={self.address}")

    def kill_node(self) -> None:
        """End the second node with all that runs on it, without a word of farewell."""
        self._kill(self._nodes.pop())

    def close(self) -> None:
        while self._nodes:
            self._kill(self._nodes.pop())
        for process in Path("/proc").glob("[0-9]*"):  # a worker that had no time to learn who started it
            with suppress(OSError):
                if os.fsencode(self._folder) in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def _start(self, *options: str) -> None:
        """Start a node, and return as soon as the cluster knows it. On a busy machine Ray may give up after 30 s."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", *_NODE, *options]
        log = self._folder / f"node-{len(self._nodes)}.log"
        for _ in range(3):
            with log.open("ab") as file:
                node = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=_ENVIRONMENT)
            self._nodes.append(node)
            try:
                if self._knows(len(self._nodes), node):
                    return
            except BaseException:
                self.close()
                raise
            self._kill(self._nodes.pop())
        raise TimeoutError(f"a node of Ray did not start: {log.read_text(errors='replace')[-2000:]}")

    def _knows(self, nodes: int, last: subprocess.Popen[bytes], seconds: float = 120) -> bool:
        """Wait until so many nodes are there; False if the last of them has ended."""
        code = (
            "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
            "sys.exit(sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]))"
        )
        host, _, port = self.address.rpartition(":")
        end = time.monotonic() + seconds
        while time.monotonic() < end and last.poll() is None:
            with socket.socket() as probe:
                answers = probe.connect_ex((host, int(port))) == 0
            asked = [sys.executable, "-c", code, self.address, str(nodes)]
            if answers and subprocess.run(asked, check=False, capture_output=True, timeout=seconds).returncode == 0:
                return True
            time.sleep(0.2)
        return False

    def _kill(self, node: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)  # workers have groups of their own, and end with their raylet
        node.wait()


@contextmanager
def running() -> Iterator[Cluster]:
    """A cluster of one node; the name of its folder is short, because sockets in it have long ones."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
