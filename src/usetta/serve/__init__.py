"""The HTTP server: `usetta serve`, or `usetta.serve.app.create_app` for an application of one's own.

A request is read and checked on the event loop, its image is decoded and cut into views by a few threads, and one
thread owns the model and answers whatever has come together. Nothing here fetches an address that a caller names.
"""

from usetta.serve.settings import Limits, Settings

__all__ = ["Limits", "Settings"]
