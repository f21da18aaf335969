"""A model for workers elsewhere: not its weights travel, but how to load it, and what it must turn out to be.

A name may stand for different weights on different machines (`auto` is whatever is there), and answers of two models
must never be mixed without a word.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from usetta.models import Model, ModelError


@dataclass(frozen=True)
class SameModel:
    """Loads the model that this process has, wherever it is called."""

    load: Callable[[], Model]
    """It is pickled, so it is a function of a module or a `partial` of one."""
    fingerprint: str

    def __call__(self) -> Model:
        model = self.load()
        if model.fingerprint != self.fingerprint:
            raise ModelError(
                f"the worker on {socket.gethostname()} has loaded another model ({model.name}) than the one that is "
                "wanted; give the model by a name or a path that means the same on all machines"
            )
        return model
