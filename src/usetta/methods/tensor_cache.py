"""Constants of a class list, such as a decomposition of its text features: computed once, and kept as long as it is."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


def cache_per_tensor(make: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """`make`, which is asked again only about a tensor that is new, or was written to since."""
    known = WeakTensorKeyDictionary()

    @wraps(make)
    def remembering(tensor: Tensor) -> T:
        version = None if tensor.is_inference() else tensor._version
        if tensor not in known or known[tensor][0] != version:
            known[tensor] = version, make(tensor)
        found: T = known[tensor][1]
        return found

    return remembering
