"""Running the application: uvicorn, and how it stops.

On SIGTERM or SIGINT the listener stays open while requests that have a place are answered, so that a load balancer sees
a 503 and not a refused connection. Then the process ends with 0. A second SIGINT ends it at once.
"""

import logging
import signal
import socket
from types import FrameType

import uvicorn

from usetta.models import Model
from usetta.serve.app import create_app
from usetta.serve.service import ModelService
from usetta.serve.settings import Settings

_log = logging.getLogger("usetta.serve")


class Server(uvicorn.Server):
    """Uvicorn that finishes what is begun."""

    def __init__(self, config: uvicorn.Config, engine: ModelService) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; not noted as caught, since uvicorn would raise the signal again at the end."""
        if self.engine.leaving and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self.engine.leaving = True

    async def on_tick(self, counter: int) -> bool:
        """Whether the time to stop has come."""
        if self.engine.failure is not None or (self.engine.leaving and not self.engine.taken):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell where it listens: the port may have been chosen by the system."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            _log.info("listening", extra={"fields": {"host": host, "port": port}})


def make_server(settings: Settings, model: Model | None = None) -> Server:
    """A server that waits for `run(sockets=[...])`."""
    app = create_app(settings, model)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,  # seconds for callers who do not take their answer
    )
    return Server(config, app.state.engine)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; OSError tells why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal ends it; ModelError if the models cannot be loaded."""
    listener = listen(host, port)
    server = make_server(settings)
    server.run(sockets=[listener])
    if server.engine.failure is not None:
        raise server.engine.failure
