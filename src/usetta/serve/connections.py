"""Connections have limits of their own: a request that never gets complete is no request yet, and takes no slot.

Who opens connections and sends nothing, or half a head, must not use up the descriptors of the process. So connections
are counted, in all and by address. One too many takes the place of the one that has waited longest for its request: a
client that sends its request at once gets through, however many there are that do not.
"""

import time
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from usetta.serve.settings import Limits

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\ncontent-length: 0\r\n\r\n"
_UNREAD = 30.0
"""Seconds that a caller has to read an answer."""


class ConnectionLimits:
    """The connections of one server. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[GuardedProtocol, None] = {}
        """The one that has waited longest first; those with a request in progress are anywhere."""

    def add(self, connection: "GuardedProtocol") -> bool:
        """Whether there is a place for one more; another may have to go for it."""
        by_address = Counter(other.address for other in self._open)
        if by_address[connection.address] >= self._limits.connections_per_address:
            has_place = self._close_one(connection.address)
        elif len(self._open) >= self._limits.connections:
            has_place = self._close_one(by_address.most_common(1)[0][0])
        else:
            has_place = True
        if has_place:
            self._open[connection] = None
        return has_place

    def remove(self, connection: "GuardedProtocol") -> None:
        """It is closed."""
        self._open.pop(connection, None)

    def move_to_end(self, connection: "GuardedProtocol") -> None:
        """It waits from now on."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def close_stale(self) -> None:
        """Close connections whose request does not come, or whose caller does not read the answer."""
        now = time.monotonic()
        for connection in list(self._open):
            longest = self._limits.pause if connection.is_waiting else self._limits.seconds + _UNREAD
            if now - connection.since > longest:
                self._close(connection)

    def _close_one(self, address: str) -> bool:
        for connection in self._open:
            if connection.is_waiting and connection.address == address:
                self._close(connection)
                return True
        return False

    def _close(self, connection: "GuardedProtocol") -> None:
        self.remove(connection)
        connection.transport.abort()  # not `close`, which would wait until a caller who does not read has read


class GuardedProtocol(H11Protocol):
    """A connection that counts, and that is known to wait for a request or to have one."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self.address = ""
        self.since = time.monotonic()
        """When it began to wait, or its request to be answered."""

    @property
    def is_waiting(self) -> bool:
        """Whether no request is complete up to its body."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._limits.add(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        waited = self.is_waiting
        super().handle_events()
        if waited and not self.is_waiting:
            self.since = time.monotonic()

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        self._limits.move_to_end(self)
        super().on_response_complete()
