"""The HTTP server: `usetta serve`, or `usetta.serve.app.create_app` for an application of one's own.

A request is read and checked on the event loop, threads decode its image and make views, and one thread owns the models
and answers whatever is ready (`service`, `worker`). Images take the same `Pipeline` as everywhere else, so an answer is
that of `Classifier`. Nothing here fetches an address that a caller names.
"""

from usetta.serve.settings import Limits, Settings

__all__ = ["Limits", "Settings"]
