"""Text features of recent class lists, as many as fit into a number of bytes.

A class list that was tuned for also holds the graph of its text tower, which is most of its size and appears only when
it is first used. So sizes are measured after the work (`trim`), not when a list comes in.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from usetta.models import Model
from usetta.prompts import DEFAULT_TEMPLATE
from usetta.text_head import TextHead

_OVERHEAD = 4096
"""Bytes of the objects around a class list, which outweigh its numbers where the list is short; measured."""


@dataclass(frozen=True)
class PromptKey:
    """What text features depend on."""

    model: str
    classes: tuple[str, ...]
    templates: tuple[str, ...] | None
    """None for the server's own: its learned context, if it has one for the model, or CLIP's template."""


@dataclass(frozen=True)
class LearnedContext:
    """A context learned for a model, and the template whose words it replaces."""

    model: str
    context: Tensor
    template: str


class PromptCache:
    """Text heads by their key, most recent last. Not safe for several threads."""

    def __init__(
        self,
        models: Mapping[str, Model],
        limit: int,
        learned: LearnedContext | None = None,
        reward_model: Model | None = None,
    ) -> None:
        self.nbytes = 0
        """Memory of all that is kept, without what it shares with the models; as of the last `trim`."""
        self._models = models
        self._limit = limit
        self._learned = learned
        self._reward_model = reward_model
        self._heads: OrderedDict[PromptKey, TextHead] = OrderedDict()
        self._sizes: dict[PromptKey, int] = {}
        self._used: set[PromptKey] = set()

    def __len__(self) -> int:
        return len(self._heads)

    def head(self, key: PromptKey) -> TextHead:
        """The text head of that key; ValueError if the text tower cannot read its names or templates."""
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._make(key)
        self._heads.move_to_end(key)
        self._used.add(key)
        return head

    def trim(self) -> None:
        """Forget the least recently used heads until the rest is within the limit."""
        for key in self._used:  # only these can have grown
            size = _OVERHEAD + self._heads[key].nbytes
            self.nbytes += size - self._sizes.get(key, 0)
            self._sizes[key] = size
        self._used.clear()
        while self.nbytes > self._limit:
            key, _ = self._heads.popitem(last=False)
            self.nbytes -= self._sizes.pop(key)

    def _make(self, key: PromptKey) -> TextHead:
        model, learned = self._models[key.model], self._learned
        if key.templates is None and learned is not None and learned.model == key.model:
            return TextHead(key.classes, model, learned.template, learned.context, self._reward_model)
        return TextHead(key.classes, model, key.templates or DEFAULT_TEMPLATE, reward_model=self._reward_model)
