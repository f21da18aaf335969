"""How this process joins a Ray cluster, and leaves it. Ray is imported here alone, when it is needed."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from usetta.distributed.base import EngineError


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected as long as it is needed; a connection of the caller's is used and left as it is."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ValueError(f"the engine 'ray' needs Ray: pip install 'usetta[cluster]' ({error})") from None
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    elif address != "auto":
        _check(address)
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        told = str(error).strip().splitlines()[0]
        if isinstance(error.__cause__, ray.exceptions.AuthenticationError):
            told += "; it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH if that is not in ~/.ray"
        raise EngineError(f"cannot join a Ray cluster at {address!r}: {told}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Tell at once if nobody is there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"an address is 'auto', 'local' or host:port, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
    except OSError as error:
        raise EngineError(f"nobody answers at {address} ({error}); is `ray start --head` running there?") from None
