"""When an answer should not be trusted: names that the model cannot read, know or distinguish, one class, mere chance.

The limits were chosen on the class names of ImageNet, Caltech101, CIFAR-10, Cars, DTD, Flowers102 and Pets, where they
find two pairs of equal names and nothing else, and on lists in nine scripts, all of which they find.
"""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from usetta.models.base import Familiarity, Model, TextTower
from usetta.models.clip import TextTransformer

ALIKE = 0.995
"""Cosine of text features from which two names count as the same: on images, their logits differ by 0.3 on average."""
FOREIGN = 0.8
"""Tokens per letter from which a name counts as foreign: the tokenizer has no pieces of words for it, only bytes."""
CHANCE = 1.2
"""A best class below this multiple of 1 / classes is hardly better than chance."""
_MOST_COMPARED = 2000
"""Names that are compared by their features, which takes time with the square of their number; beyond, by spelling."""
_BLOCK = 1024
_LISTED = 3


class AnswerWarning(UserWarning):
    """The answers may not mean what they seem to."""


def class_warnings(classes: Sequence[str], model: Model, features: Tensor) -> tuple[str, ...]:
    """What is doubtful about class names, given their text features (C, D) of unit length."""
    tower, warnings = model.text, []
    if len(classes) == 1:
        warnings.append("there is only one class, so every image gets it with a probability of 100 %")
    foreign = _foreign_names(classes, tower)
    if foreign:
        warnings.append(
            f"{_count(len(foreign), 'class name')} in letters that the model hardly knows: {_listed(foreign)}; "
            "English names work best"
        )
    familiarity: Familiarity | None = getattr(tower, "familiarity", None)
    unfamiliar = familiarity.unfamiliar(classes, features) if familiarity else []
    unfamiliar = [name for name in unfamiliar if name not in foreign]
    if unfamiliar:
        warnings.append(
            f"the {model.name} model may not know: {_listed(unfamiliar)}; for such names use CLIP's weights"
        )
    alike, pairs = _alike_by_features(features) if len(classes) <= _MOST_COMPARED else _alike_by_spelling(classes)
    if alike:
        shown = [f"{classes[i]!r} and {classes[j]!r}" for i, j in pairs]
        warnings.append(
            f"{_count(alike, 'pair')} of class names that the model hardly distinguishes: {_listed(shown, alike)}"
        )
    return tuple(warnings)


def is_near_chance(confidence: float, classes: int) -> bool:
    """Whether the best of so many classes is hardly more probable than all would be by chance."""
    return classes > 1 and confidence < CHANCE / classes


def chance_warning(classes: int, doubtful: int = 1, images: int = 1) -> str:
    """The warning about one image, or about the `doubtful` ones of several, for which `is_near_chance` holds."""
    text = f"the best of {classes} classes is hardly better than chance"
    return text if images == 1 else f"{doubtful} of {images} images: {text}"


def _foreign_names(classes: Sequence[str], tower: TextTower) -> list[str]:
    """Names in a script that CLIP's byte-level tokenizer did not learn; other tokenizers cannot be judged like this.

    ASCII letters are in everything it learned, so only names with others are looked at.
    """
    if not isinstance(tower, TextTransformer):
        return []
    names = []
    for name in classes:
        if not name.isascii():
            letters = "".join(character if character.isalpha() else " " for character in name)
            tokens = len(tower.tokenizer.encode(letters))
            if tokens > 1 and tokens >= FOREIGN * sum(map(str.isalpha, letters)):
                names.append(name)
    return names


def _alike_by_features(features: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """How many pairs of names have nearly the same features, and the first few."""
    count, pairs = 0, list[tuple[int, int]]()
    for start in range(0, len(features), _BLOCK):
        alike = (features[start : start + _BLOCK].float() @ features.float().T >= ALIKE).triu(start + 1)
        count += int(alike.sum())
        if len(pairs) < _LISTED:
            pairs += [(start + i, j) for i, j in alike.nonzero()[:_LISTED].tolist()]
    return count, pairs[:_LISTED]


def _alike_by_spelling(classes: Sequence[str]) -> tuple[int, list[tuple[int, int]]]:
    """The same for names that are spelled alike, in time that grows with their number only."""
    spelled = [" ".join(name.replace("_", " ").lower().split()) for name in classes]
    counts = Counter(spelled)
    first: dict[str, int] = {}
    pairs = [(first[name], i) for i, name in enumerate(spelled) if counts[name] > 1 and first.setdefault(name, i) != i]
    return sum(n * (n - 1) // 2 for n in counts.values()), pairs[:_LISTED]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str], count: int | None = None) -> str:
    more = (len(names) if count is None else count) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
