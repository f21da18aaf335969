"""A real Ray cluster on this machine: `ray start` for the head and for every further node."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NODE = ("--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000")

_TESTS = str(Path(__file__).parents[1])
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))}
"""The actors import workers and models from the tests."""


class Cluster:
    """Nodes of one CPU each, and a connection of this process to them."""

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
        """Kill the second node with everything that runs on it."""
        self._kill(self._nodes.pop())

    def close(self) -> None:
        import ray

        ray.shutdown()
        while self._nodes:
            self._kill(self._nodes.pop())
        # A process that Ray was just starting does not know yet that its parent is dead.
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(self._folder) in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def _start(self, *options: str) -> None:
        """Start a node and wait until the cluster knows it. On a busy machine Ray may give up after 30 s: try again."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", *_NODE, *options]
        log = self._folder / f"node-{len(self._nodes)}.log"
        for _ in range(3):
            with log.open("ab") as file:
                node = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=_ENVIRONMENT)
            self._nodes.append(node)
            try:
                if self._is_up(len(self._nodes), node):
                    return
            except BaseException:
                self.close()
                raise
            self._kill(self._nodes.pop())
        raise TimeoutError(f"a Ray node did not start: {log.read_text(errors='replace')[-2000:]}")

    def _is_up(self, nodes: int, last: subprocess.Popen[bytes], seconds: float = 120) -> bool:
        """Wait until so many nodes are alive; False if the last of them has ended."""
        import ray

        host, _, port = self.address.rpartition(":")
        end = time.monotonic() + seconds
        while time.monotonic() < end and last.poll() is None:
            with socket.socket() as probe:
                answers = probe.connect_ex((host, int(port))) == 0
            if answers:
                with suppress(ConnectionError, RuntimeError):  # the head listens before it is ready
                    if not ray.is_initialized():
                        ray.init(self.address, log_to_driver=False, logging_level="ERROR")
                    if sum(node["Alive"] for node in ray.nodes()) >= nodes:
                        return True
            time.sleep(0.1)
        return False

    def _kill(self, node: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)  # workers have groups of their own, and end with their raylet
        node.wait()


@contextmanager
def running() -> Iterator[Cluster]:
    """A cluster of one node. Its folder has a short name, because paths of sockets must not be long."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
