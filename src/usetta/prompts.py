"""Class names × template × context → text features, their pullback, and the features of other contexts.

Names are cleaned as CLIP's benchmarks do: underscores become spaces, nothing else changes (the tokenizer lower-cases by
itself). Several templates make an ensemble: unit-length features are averaged over templates and normalised again.
Two equal names are allowed (ImageNet has "missile" twice): they get equal probabilities.

The context is the embeddings of the template's words before the name. Every image starts from the same one, so the
forward pass at it is a constant of tower and class list: it is done once, its graph is kept, and the gradient that an
image needs is a pullback through that graph. CLIP's own tower runs packed (`models.packed`); any other tower computes
all positions, because a bidirectional one attends to its padding.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from usetta import cancellation
from usetta.models.base import TextTower
from usetta.models.clip import TextTransformer
from usetta.models.packed import PackedTexts
from usetta.progress import bar
from usetta.shared_steps import SharedSteps
from usetta.text_cache import TextCache, text_digest

DEFAULT_TEMPLATE = "a photo of a {}."

ENSEMBLE = "an ensemble of templates has no single context"
"""Why several templates cannot be tuned."""

TEMPLATES = {
    "ensemble": (
        "a bad photo of the {}.",
        "a {} in a video game.",
        "a origami {}.",
        "a photo of the small {}.",
        "art of the {}.",
        "a photo of the large {}.",
        "itap of a {}.",
    ),
}
"""Lists of templates that have a name: the paper's seven."""

MEMORY, DEVICE_MEMORY = 2**30, 2**32
"""Bytes that the graphs of one class list may take on a CPU, and on a GPU; classes and images go through in chunks.

A token of CLIP ViT-B/16's text tower takes about 0.2 MB, so 100 ImageNet classes take about 100 MB and 1000 about 900.
Seven eighths of the memory are for graphs that are kept, the rest for the others: these are built anew for every batch
of images, chunk by chunk.
"""

_BYTES_PER_TEXT = 2048
"""Of the objects around the numbers of one text, which outweigh them where texts are short; measured."""

_LONG_LIST = 2000
"""Texts that take so long to encode that people are shown a bar."""

_AT_ONCE, _DEVICE_AT_ONCE = 1024, 2**15
"""Tokens computed at a time where no graph is built, on a CPU and on a GPU.

1024 take about 30 MB in CLIP ViT-B/16 and keep a processor busy. A GPU would wait for the next launch most of the time.
"""


class _Texts(Protocol):
    """One template filled with all names: what the two ways through a tower have in common."""

    shared: int
    """Tokens computed once per context."""
    lengths: list[int]
    """Tokens computed per context and text."""

    def encode(self, contexts: Tensor, first: int, last: int) -> Tensor:
        """Unit-length features (B, last - first, D) of those texts with each of `contexts` (B, n, W)."""
        ...

    def pick(self, rows: list[int]) -> Self:
        """Some of the texts, in rising order."""
        ...


class _Graph:
    """The forward pass at the initial context for the texts from `first` to `last`, ready to be differentiated."""

    def __init__(self, texts: _Texts, context: Tensor, first: int, last: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._context = context.clone().requires_grad_()
            self._features = texts.encode(self._context[None], first, last)

    def pullback(self, grad: Tensor) -> Tensor:
        """Gradients with respect to the context (B, n, W) of those with respect to the features (B, texts, D)."""

        def of_image(own: Tensor) -> Tensor:
            return torch.autograd.grad(self._features, self._context, own[None], retain_graph=True)[0]

        if len(grad) == 1:  # without PyTorch's batching, which costs a tenth
            return of_image(grad[0])[None]
        # Not `is_grads_batched`, which runs many operations of the backward pass image by image.
        with warnings.catch_warnings():  # the attention of other people's towers is among the few that remain
            warnings.filterwarnings("ignore", "There is a performance drop")
            gradients: Tensor = torch.vmap(of_image)(grad)
        return gradients


class ClassPrompts:
    """The prompts of a list of classes for one text tower, which must not change afterwards.

    `templates` are texts with `{}` for the name, or a name of `TEMPLATES`.
    `context` (n, W), for example CoOp's, stands in for the embeddings of the n tokens before the name; without it the
    attribute of that name holds those embeddings. `cache` may have the features of the same prompts on disk.
    """

    def __init__(
        self,
        tower: TextTower,
        classes: Sequence[str],
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: Tensor | None = None,
        cache: TextCache | None = None,
    ) -> None:
        templates = expand_templates(templates)
        _check_classes(classes)
        names = [name.replace("_", " ") for name in classes]
        with torch.inference_mode(False):  # indices made in it could not take part in a backward pass
            filled = [_Template(tower, template, names) for template in templates]
        self._fixed = filled[0].fixed if len(filled) == 1 else ENSEMBLE
        if context is not None:
            self.check_tunable()
            filled[0].replace(context)
        self.context = filled[0].context if not self._fixed else filled[0].context[:0]
        """Where tuning starts: (n, W), in float32 or float64; empty if there is nothing to tune."""
        self.steps = SharedSteps()
        """Of methods that tune the prompts of the same images."""
        self._templates = filled
        self._cache = cache
        self._features: Tensor | None = None
        self._gradients: dict[Callable[[Tensor], Tensor], Tensor] = {}

    def features(self) -> Tensor:
        """Unit-length text features (C, D) at the initial context, in the order of the classes."""
        if self._features is None:
            with torch.inference_mode(False), torch.no_grad():
                if self._cache is None:
                    self._features = self._encode()
                else:
                    texts = " ".join(template.digest() for template in self._templates)
                    self._features = self._cache.get(texts, len(self._templates[0]), self._encode)
        return self._features

    def _encode(self) -> Tensor:
        features = [template.encode(template.context[None])[0] for template in self._templates]
        # A single template is not normalised twice: that would change its bits.
        return normalize(torch.stack(features).mean(dim=0), dim=-1) if len(features) > 1 else features[0]

    @property
    def nbytes(self) -> int:
        """Bytes of names, embeddings, features and kept graphs, without the tower; it grows with what was asked for."""
        features = 0 if self._features is None else self._features.nbytes
        return features + sum(template.nbytes for template in self._templates)

    def pullback(self, grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """The vector-Jacobian product at the initial context, for a batch of images.

        grad: (B, C, D), a loss's gradient with respect to `features()`. Returns its gradient with respect to the
        context (B, n, W). The forward pass is not repeated as long as its graph fits into `MEMORY`.

        With `classes` (K,), positions in the list, `grad` (B, K, D) is about those alone, and no graph is kept.
        """
        self.check_tunable()
        template = self._templates[0] if classes is None else self._templates[0].pick(classes)
        expected = len(self.features() if classes is None else classes), self.features().shape[1]
        if grad.ndim != 3 or tuple(grad.shape[1:]) != expected:
            raise ValueError(f"gradients must be of shape (B, {expected[0]}, {expected[1]}), got {tuple(grad.shape)}")
        grad = grad.detach().to(self.features())
        return self.steps.get(lambda: template.pullback(grad), "pullback", [grad, classes])

    def gradient_of(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Gradient with respect to the initial context (n, W) of a `value` of the features (C, D), as their spread is.

        No image takes part in it, so it is computed once.
        """
        if value not in self._gradients:
            with torch.inference_mode(False), torch.enable_grad():
                features = self.features().clone().requires_grad_()
                (grad,) = torch.autograd.grad(value(features), features)
            self._gradients[value] = self._templates[0].pullback(grad[None])[0]
        return self._gradients[value]

    def encode(self, contexts: Tensor, classes: Tensor | None = None) -> Tensor:
        """Unit-length text features (B, C, D) of `contexts` (B, n, W), differentiable in them.

        With `classes` (K,), positions in the list, only those: (B, K, D).
        """
        self.check_tunable()
        n, width = self.context.shape
        if contexts.ndim != 3 or tuple(contexts.shape[1:]) != (n, width):
            raise ValueError(f"contexts must be of shape (B, {n}, {width}), got {tuple(contexts.shape)}")
        template = self._templates[0] if classes is None else self._templates[0].pick(classes)
        if not len(contexts):
            return self.features()[: len(template)].expand(0, -1, -1)
        contexts = contexts.to(self.context.device)
        if torch.is_grad_enabled() and contexts.requires_grad:
            return template.encode(contexts)
        return self.steps.get(lambda: template.encode(contexts), "features", [contexts, classes])

    def check_tunable(self) -> None:
        """Raise ValueError if there is no context to tune."""
        if self._fixed:
            raise ValueError(f"there is no context to tune: {self._fixed}")


class _Template:
    """A template with every name in its place. Equal texts are computed once, and shorter ones come first."""

    def __init__(self, tower: TextTower, template: str, names: Sequence[str]) -> None:
        ids = tower.tokenize([template.replace("{}", name) for name in names])
        start, n, self.fixed = _find_context(tower, template, ids)
        distinct, self._row = torch.unique(ids, dim=0, return_inverse=True)
        if isinstance(tower, TextTransformer):
            order = distinct.argmax(-1).argsort(stable=True)
            distinct, self._row = distinct[order], order.argsort()[self._row]
            self._texts: _Texts = PackedTexts(tower, distinct, n)
        else:
            self._texts = _PaddedTexts(tower, distinct, start, n)
        with torch.inference_mode(False), torch.no_grad():
            words = tower.embed(distinct[:1, start : start + n])[0]
            self.context = words.to(torch.promote_types(words.dtype, torch.float32))
        self._row = self._row.to(words.device)
        self._tower, self._ids = tower, distinct
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._token_bytes: float | None = None

    def __len__(self) -> int:
        return len(self._row)

    def digest(self) -> str:
        """A hash of the texts, the embeddings of their tokens, and the context."""
        return text_digest(self._ids, self._row, self._tower.embed(self._ids.unique()[None]), self.context)

    @property
    def nbytes(self) -> int:
        """Bytes of the texts, their embeddings and the graphs that are kept."""
        lengths = self._texts.lengths
        in_graphs = sum(self._tokens(first, last) for first, last in self._graphs)
        texts = len(lengths) * _BYTES_PER_TEXT + sum(lengths) * self.context.shape[-1] * 4
        return texts + int(in_graphs * (self._token_bytes or 0))

    @property
    def _memory(self) -> int:
        return MEMORY if self.context.device.type == "cpu" else DEVICE_MEMORY

    @property
    def _at_once(self) -> int:
        return _AT_ONCE if self.context.device.type == "cpu" else _DEVICE_AT_ONCE

    def pick(self, classes: Tensor) -> "_Template":
        """The same template with the names of `classes` (K,) only, and no graphs."""
        rows, places = torch.unique(self._row[classes.to(self._row.device)], return_inverse=True)
        picked = copy(self)
        texts = self._texts.pick(rows.tolist())
        picked._texts, picked._row, picked._graphs = texts, places, {}  # noqa: SLF001 - a copy of itself
        return picked

    def replace(self, context: Tensor) -> None:
        """Start from `context` instead of the words."""
        if context.shape != self.context.shape:
            raise ValueError(
                f"this template's context has the shape {tuple(self.context.shape)}, the given one "
                f"{tuple(context.shape)}: write as many words before '{{}}' as the context has tokens"
            )
        self.context = context.detach().to(self.context).clone()

    def encode(self, contexts: Tensor) -> Tensor:
        """Features (B, C, D) of all classes with each of `contexts` (B, n, W)."""
        limit, recompute = self._at_once, False
        if torch.is_grad_enabled() and contexts.requires_grad:
            limit = self._graph_tokens(self._memory // 8)
            recompute = len(contexts) * self._tokens(0, len(self._texts.lengths)) > self._graph_tokens(self._memory)

        def chunk(contexts: Tensor, first: int, last: int) -> Tensor:
            if recompute:  # in the backward pass, because all graphs together would not fit
                features: Tensor = checkpoint(self._texts.encode, contexts, first, last, use_reentrant=False)
                return features
            return self._texts.encode(contexts, first, last)

        columns = []
        texts = len(self._texts.lengths)
        with bar(texts, "Encoding class names", None if texts >= _LONG_LIST else False) as tick:
            for first, last in self._chunks(limit):
                cancellation.checkpoint()
                images = max(1, limit // self._tokens(first, last))
                columns.append(torch.cat([chunk(split, first, last) for split in torch.split(contexts, images)]))
                tick(last - first, "")
        return torch.cat(columns, 1)[:, self._row]

    def pullback(self, grad: Tensor) -> Tensor:
        """Gradients with respect to the context (B, n, W) of those with respect to the features (B, C, D)."""
        total = self.context.new_zeros(len(grad), *self.context.shape)
        if not len(grad):
            return total
        distinct = grad.new_zeros(len(grad), len(self._texts.lengths), grad.shape[2]).index_add_(1, self._row, grad)
        kept = 0
        for first, last in self._chunks(self._graph_tokens(self._memory // 8)):
            cancellation.checkpoint()
            kept += self._tokens(first, last)
            keep = kept <= self._graph_tokens(self._memory - self._memory // 8)
            total += self._pull_chunk(distinct[:, first:last], first, last, keep)
        return total

    def _pull_chunk(self, grad: Tensor, first: int, last: int, keep: bool) -> Tensor:
        """The part of the pullback from some texts; a graph that is not kept is freed before the next is built."""
        graph = self._graphs.get((first, last)) or _Graph(self._texts, self.context, first, last)
        if keep:
            self._graphs[first, last] = graph
        images = max(1, self._at_once // self._tokens(first, last))
        return torch.cat([graph.pullback(split) for split in torch.split(grad, images)])

    def _chunks(self, limit: int) -> Iterator[tuple[int, int]]:
        """Ranges of texts that have at most `limit` tokens together, or of a single text."""
        first, tokens = 0, self._texts.shared
        for row, length in enumerate(self._texts.lengths):
            if row > first and tokens + length > limit:
                yield first, row
                first, tokens = row, self._texts.shared
            tokens += length
        yield first, len(self._texts.lengths)

    def _tokens(self, first: int, last: int) -> int:
        return self._texts.shared + sum(self._texts.lengths[first:last])

    def _graph_tokens(self, size: int) -> int:
        """How many tokens have a graph of `size` bytes: measured, because towers differ in architecture."""
        if self._token_bytes is None:
            longest = len(self._texts.lengths) - 1
            # What a third context adds: the weights cancel out. (With one context, tensors that are copies for several
            # would be views, and be missed.)
            two, three = (_graph_bytes(self._texts, self.context.expand(n, -1, -1), longest) for n in (2, 3))
            self._token_bytes = (three - two) / self._tokens(longest, longest + 1)
        return int(size / self._token_bytes)


class _PaddedTexts:
    """Texts of any tower, padded as it wants them, with a context of `n` tokens from position `start` on."""

    shared = 0

    def __init__(self, tower: TextTower, ids: Tensor, start: int, n: int) -> None:
        self.lengths = [ids.shape[1]] * len(ids)
        self._tower = tower
        self._ids = ids
        self._start, self._stop = start, start + n

    def pick(self, rows: list[int]) -> Self:
        """Some of the texts, in rising order."""
        picked = copy(self)
        picked.lengths = [self.lengths[row] for row in rows]
        picked._ids = self._ids[rows]  # noqa: SLF001 - a copy of itself
        return picked

    def encode(self, contexts: Tensor, first: int, last: int) -> Tensor:
        """Unit-length features (B, last - first, D) of those texts with each of `contexts` (B, n, W)."""
        ids = self._ids[first:last]
        words = self._tower.embed(ids).expand(len(contexts), -1, -1, -1)
        context = contexts.to(words.dtype)[:, None].expand(-1, len(ids), -1, -1)
        spliced = torch.cat([words[:, :, : self._start], context, words[:, :, self._stop :]], 2)
        features = self._tower.encode(spliced.flatten(0, 1), ids.repeat(len(contexts), 1))
        return features.view(len(contexts), len(ids), -1)


def _find_context(tower: TextTower, template: str, ids: Tensor) -> tuple[int, int, str]:
    """Where the context stands in all of `ids`: its first position and its length, and if it has none, why.

    In tokens, the words alone are the empty text with the context inserted, which shows its place for every tokenizer.
    """
    words = template.partition("{}")[0]
    empty, alone = tower.tokenize(["", words])
    if torch.equal(empty, alone):
        return 0, 0, f"there are no words before '{{}}' in {template!r}"
    length = len(empty)
    start = int((empty != alone).nonzero()[0])
    n = next(n for n in range(1, length) if torch.equal(alone[start + n :], empty[start : length - n]))
    if torch.isin(alone[start : start + n], empty).any():
        return 0, 0, f"there is a special token before '{{}}' in {template!r}"
    # Such as "un{}", whose last token depends on the name.
    if not (ids[:, : start + n] == alone[: start + n]).all():
        return 0, 0, f"the words before '{{}}' in {template!r} merge with class names into other tokens"
    return start, n, ""


def _graph_bytes(texts: _Texts, contexts: Tensor, row: int) -> int:
    """Bytes that autograd keeps, the weights included, for one text with `contexts` (B, n, W)."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.inference_mode(False), torch.enable_grad():
        leaf = contexts.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            kept = texts.encode(leaf, row, row + 1)
    del kept  # not earlier: it holds the graph, and freed storages would share addresses
    return sum(sizes.values())


def _check_classes(classes: Sequence[str]) -> None:
    if isinstance(classes, str):
        raise ValueError(f"classes must be a list of names, not one string ({classes!r})")
    if not classes:
        raise ValueError("no class names given")
    for position, name in enumerate(classes, start=1):
        if not isinstance(name, str):
            raise ValueError(f"class names must be strings, but number {position} is {name!r}")
        if not name.replace("_", " ").strip():
            raise ValueError(f"class name number {position} is empty")


def expand_templates(templates: str | Sequence[str]) -> list[str]:
    """The templates with those that have a name written out; one without a place for the class name is an error."""
    given = [templates] if isinstance(templates, str) else templates
    expanded = [template for name in given for template in TEMPLATES.get(name, (name,))]
    if not expanded:
        raise ValueError("there must be at least one template")
    for template in expanded:
        if template.count("{}") != 1:
            raise ValueError(
                f"a template must contain {{}} once, in place of the class name, as in {DEFAULT_TEMPLATE!r}; "
                f"got {template!r}"
            )
    return expanded
