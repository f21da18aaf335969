"""A fresh virtual environment with usetta from its wheel, and a way to type commands in it.

The wheel is built from the source package, as for an upload, and installed without the repository: package data,
entry points and metadata are those that a user gets. To keep this quick, other packages are borrowed from the
environment that runs the tests, by a .pth file; its editable usetta is not, because its own .pth files are not read.

Importing torch takes seconds, so the environment's Python imports usetta once (`SERVER`) and forks for every command;
it computes in one thread, so there are no threads that a fork would lose. A command that asks for a published model
gets a tiny one: what is tested is that the command works as it is written.
"""

import json
import os
import shlex
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://git.example.org/usetta/usetta"

SERVER = """
import json, os, runpy, sys
import usetta.classifier, usetta.cli, usetta.evaluate.runner, usetta.models, usetta.report.run
real = usetta.models.load_model
tiny = real(sys.argv[1], device="cpu", precision="fp32")

def load_model(name, **options):
    return tiny if name in ("auto", "embedded", "ViT-B-16", "ViT-L-14") else real(name, **options)

usetta.models.load_model = usetta.classifier.load_model = usetta.load_model = load_model

def run(program, *arguments):
    sys.argv = [program, *arguments]
    if program == "usetta":
        usetta.cli.main()
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_path(arguments[0], run_name="__main__")

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(request["folder"])
        for number, path in ((1, request["stdout"]), (2, request["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = 70
        try:
            run(*request["arguments"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Typed:
    """What a command did."""

    code: int
    stdout: str
    stderr: str


class FreshEnvironment:
    """A virtual environment with the wheel; `packages` holds what was built."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "dist"
        self._run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", self.packages, ROOT],
            os.environ | {"USETTA_REPOSITORY": REPOSITORY},
        )
        self.home = folder / "venv"
        venv.create(self.home, symlinks=True)
        self.python = self.home / "bin" / "python"
        (wheel,) = self.packages.glob("*.whl")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        self._run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel])
        (site,) = self.home.glob("lib/python*/site-packages")
        borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        self._server: subprocess.Popen[str] | None = None

    @staticmethod
    def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def shell(self, command: str, folder: Path) -> Typed:
        """A command as a shell runs it, in a process of its own and with the real model."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=self.environment, capture_output=True, text=True, check=False
        )
        return Typed(done.returncode, done.stdout, done.stderr)

    def type(self, command: str, folder: Path, tiny_checkpoint: Path) -> Typed:
        """A command of usetta or a script, by the process that has imported usetta, with the tiny model."""
        if self._server is None:
            self._server = subprocess.Popen(
                [self.python, "-c", SERVER, tiny_checkpoint],
                cwd=folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._server.stdout
            assert self._server.stdout.readline() == "ready\n"
        assert self._server.stdin
        assert self._server.stdout
        command, redirected, target = command.partition(" > ")
        stdout, stderr = folder / (target if redirected else ".stdout"), folder / ".stderr"
        request = {
            "arguments": shlex.split(command),
            "folder": str(folder),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return Typed(code, stdout.read_text(encoding="utf-8"), stderr.read_text(encoding="utf-8"))

    def close(self) -> None:
        """End the process that runs the commands."""
        if self._server is not None:
            self._server.communicate()
