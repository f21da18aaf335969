"""Text features of recent class lists, as many as fit into a number of bytes.

A class list that was tuned for also holds the graph of its text tower, which is most of what it weighs, and grows when
it is first used. So the weight is taken after the work, not when a list comes in.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from usetta.classifier import Classifier
from usetta.models import Model
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts


@dataclass(frozen=True)
class PromptKey:
    """What text features depend on."""

    model: str
    classes: tuple[str, ...]
    templates: tuple[str, ...] | None
    """None for the server's own: its learned context, if it has one for the model, or CLIP's template."""


@dataclass(frozen=True)
class Learned:
    """A context learned for a model, and the template whose words it stands in for."""

    model: str
    context: Tensor
    template: str


class PromptCache:
    """Classifiers by their wording, most recent last. For one thread alone."""

    def __init__(self, models: Mapping[str, Model], limit: int, learned: Learned | None = None) -> None:
        self.nbytes = 0
        """Memory of all that is kept, but for what it shares with the models; as of the last `trim`."""
        self._models = models
        self._limit = limit
        self._learned = learned
        self._kept: OrderedDict[PromptKey, Classifier] = OrderedDict()
        self._weights: dict[PromptKey, int] = {}
        self._used: set[PromptKey] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def classifier(self, wording: PromptKey) -> Classifier:
        """The classifier of that wording; ValueError if the text tower cannot read it."""
        found = self._kept.get(wording)
        if found is None:
            found = self._kept[wording] = self._make(wording)
        self._kept.move_to_end(wording)
        self._used.add(wording)
        return found

    def trim(self) -> None:
        """Forget what was not used for longest, until the rest is within the limit."""
        for wording in self._used:  # the others weigh what they did
            weight = _nbytes(self._kept[wording])
            self.nbytes += weight - self._weights.get(wording, 0)
            self._weights[wording] = weight
        self._used.clear()
        while self.nbytes > self._limit:
            wording, _ = self._kept.popitem(last=False)
            self.nbytes -= self._weights.pop(wording)

    def _make(self, wording: PromptKey) -> Classifier:
        model = self._models[wording.model]
        learned = self._learned
        if wording.templates is None and learned is not None and learned.model == wording.model:
            return Classifier(wording.classes, model, "clip", templates=learned.template, context=learned.context)
        return Classifier(wording.classes, model, "clip", templates=wording.templates or DEFAULT_TEMPLATE)


_PER_LIST, _PER_TEXT = 4096, 2048
"""Bytes of the objects around the numbers, which outweigh them where lists and texts are short; measured."""


def _nbytes(classifier: Classifier) -> int:
    """Of the names, the features, the embeddings, and the graphs that tuning left behind."""
    wordings = [classifier._prompts, *(value for name, value in vars(classifier).items() if name == "_words")]
    return _PER_LIST + sum(map(_prompts_nbytes, wordings))


def _prompts_nbytes(prompts: ClassPrompts) -> int:
    total = 0 if prompts._features is None else prompts._features.nbytes
    for template in prompts._templates:
        lengths = template._texts.lengths
        in_graphs = sum(template._tokens(first, last) for first, last in template._graphs)
        total += len(lengths) * _PER_TEXT + sum(lengths) * template.context.shape[-1] * 4
        total += int(in_graphs * (template._token_bytes or 0))
    return total
