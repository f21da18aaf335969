"""Learn a context from a few labelled images, as CoOp does, on features that are computed once.

CoOp augments anew in every epoch and encodes every image again. The image tower is frozen, so here each image has a
fixed number of views, which are encoded once, and every epoch takes one of them at random. All the rest is CoOp's:
loss, optimiser, schedule, batches.

The file is written after every epoch with everything that the next one depends on, and an epoch draws from a generator
of its own. So the same call continues where the last one was stopped, and ends with the same bits.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from usetta.coop.context import CONTEXT, LOSSES, MOMENTUM, START, read_context_file, save_context, start_token
from usetta.coop.shots import Shot, draw_shots, encode_shots, generator
from usetta.feature_cache import FeatureCache
from usetta.images import ImageSource
from usetta.models.base import Model, ModelError
from usetta.progress import track
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts

_STD = 0.02  # of a context that starts at random

_HASHED = {"fingerprint": "another model", "class_names": "other classes", "image_ids": "other images"}
"""What it means if these entries of two trainings differ, which are hashes; of the others the values are reported."""


@dataclass(frozen=True)
class CoOpRecipe:
    """How a context is learned; the defaults are those of CoOp's ImageNet experiments, but for `views`."""

    shots: int = 16
    """Images of each class, or all if there are fewer."""
    epochs: int = 50
    lr: float = 0.002
    """At the start of the cosine, which ends near 0."""
    batch_size: int = 32
    views: int = 9
    """Views of each image: the weak one and random crops."""
    seed: int = 0
    """Of shots, views, the first context and batches."""
    template: str = DEFAULT_TEMPLATE
    """The words before the name give the context its length; what comes after stays."""
    init: str = "random"
    """Where the context starts: `random`, or the `words` of the template."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: int = 1
    """Epochs at the constant rate `warmup_lr`, before the cosine starts."""
    warmup_lr: float = 1e-5

    def __post_init__(self) -> None:
        for setting in ("shots", "epochs", "batch_size", "views"):
            if getattr(self, setting) < 1:
                raise ValueError(f"{setting} must be at least 1, not {getattr(self, setting)!r}")
        for setting in ("seed", "momentum", "weight_decay", "warmup_epochs", "warmup_lr"):
            if not 0 <= getattr(self, setting) < math.inf:
                raise ValueError(f"{setting} must not be negative, got {getattr(self, setting)!r}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0, not {self.lr!r}")
        if self.init not in ("random", "words"):
            raise ValueError(f"init must be 'random' or 'words', not {self.init!r}")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0. The cosine starts after the warm-up, so it is cut short."""
        if epoch < self.warmup_epochs:
            return self.warmup_lr
        return self.lr * (1 + math.cos(math.pi * (epoch - self.warmup_epochs) / self.epochs)) / 2


@dataclass(frozen=True)
class _TrainingState:
    """A training after as many epochs as there are losses."""

    context: Tensor
    """(n, W)"""
    momentum: Tensor
    """(n, W)"""
    losses: tuple[float, ...] = ()
    """The mean loss of each epoch."""


@torch.inference_mode(False)  # its tensors could take no part in a backward pass
def train_context(
    model: Model,
    images: Sequence[ImageSource],
    labels: Sequence[int],
    classes: Sequence[str],
    recipe: CoOpRecipe | None = None,
    *,
    out: str | PathLike[str] | None = None,
    log: Callable[[str], object] = warnings.warn,
    progress: bool | None = None,
    cache: FeatureCache | None = None,
) -> Tensor:
    """The context (n, W) that separates `classes` best on shots of `images`; `labels` are positions in `classes`.

    out: the file to write after every epoch. If it exists, this training continues from it, or is finished already;
    a file of another training is never overwritten.
    log: called with a line about each image that cannot be read and is left out, and about where a training continues.
    cache: keeps features of views from one call to the next.
    """
    recipe = recipe or CoOpRecipe()
    prompts = ClassPrompts(model.text, classes, recipe.template)
    if not len(prompts.context):
        raise ValueError(f"the template {recipe.template!r} needs words before {{}}, which are then learned")
    shots = draw_shots(images, labels, classes, recipe.shots, recipe.seed, log)
    file = _ContextFile(Path(out), _describe(model, shots, classes, recipe), model) if out is not None else None
    state = (file.read(prompts.context) if file else None) or _first_state(prompts, recipe)
    done = len(state.losses)
    if done:
        now = "is already finished" if done == recipe.epochs else f"continues after epoch {done} of {recipe.epochs}"
        log(f"{out}: the training {now}")
    if done == recipe.epochs:
        return state.context
    if file:
        file.write(state, recipe.epochs)  # now, so that a place that cannot be written to fails before the work
    views = encode_shots(model, shots, recipe.views, recipe.seed, progress, cache).to(prompts.context)
    targets = torch.tensor([shot.label for shot in shots], device=views.device)
    for epoch in track(range(done, recipe.epochs), recipe.epochs - done, "Learning", progress):
        state = _after_epoch(state, epoch, views, targets, prompts, model.logit_scale, recipe)
        if file:
            file.write(state, recipe.epochs)
    return state.context


def _first_state(prompts: ClassPrompts, recipe: CoOpRecipe) -> _TrainingState:
    words = prompts.context
    # Drawn on the host, so that the start is the same on every device.
    drawn = torch.from_numpy(generator("context", recipe.seed).normal(0, _STD, words.shape)).to(words.dtype)
    return _TrainingState(words.clone() if recipe.init == "words" else drawn.to(words.device), torch.zeros_like(words))


def _after_epoch(
    state: _TrainingState,
    epoch: int,
    views: Tensor,
    labels: Tensor,
    prompts: ClassPrompts,
    logit_scale: float,
    recipe: CoOpRecipe,
) -> _TrainingState:
    """One pass over images with features `views` (n, V, D) and `labels` (n,), in random order, one view of each.

    As in CoOp, a last batch that is not full is left out, unless it is the only one.
    """
    rng = generator("order", recipe.seed, epoch)
    order = torch.from_numpy(rng.permutation(len(views)))
    features = views[order, torch.from_numpy(rng.integers(views.shape[1], size=len(views)))]
    labels = labels[order]
    context, momentum, losses = state.context, state.momentum, []
    for last in range(min(recipe.batch_size, len(views)), len(views) + 1, recipe.batch_size):
        rows = slice(max(0, last - recipe.batch_size), last)
        loss, gradient = _loss(context, features[rows], labels[rows], prompts, logit_scale)
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss} in epoch {epoch + 1}: lower the learning rate ({recipe.lr})")
        losses.append(loss)
        momentum = recipe.momentum * momentum + gradient + recipe.weight_decay * context
        context = context - recipe.rate(epoch) * momentum
    return replace(state, context=context, momentum=momentum, losses=(*state.losses, math.fsum(losses) / len(losses)))


def _loss(
    context: Tensor, features: Tensor, labels: Tensor, prompts: ClassPrompts, logit_scale: float
) -> tuple[float, Tensor]:
    """Cross-entropy of a batch (B, D), and its gradient with respect to `context` (n, W)."""
    with torch.enable_grad():
        leaf = context.clone().requires_grad_()
        loss = cross_entropy(logit_scale * features @ prompts.encode(leaf[None])[0].T, labels)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


def _describe(model: Model, shots: Sequence[Shot], classes: Sequence[str], recipe: CoOpRecipe) -> dict[str, str]:
    """All that the result depends on, as the metadata of its file."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "classes": str(len(classes)),
        "class_names": _digest(classes),
        "images": str(len(shots)),
        "image_ids": _digest([f"{shot.label} {shot.id}" for shot in shots]),
        **{key: str(value) for key, value in asdict(recipe).items()},
    }


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


class _ContextFile:
    """The file of one training, which its description distinguishes from others."""

    def __init__(self, path: Path, description: dict[str, str], model: Model) -> None:
        self.path = path
        self._description = description
        self._start = start_token(model.text)

    def read(self, like: Tensor) -> _TrainingState | None:
        """The state of this training, on the device of `like`; None if there is no file. Other files are errors."""
        if not self.path.exists():
            return None
        tensors, metadata = read_context_file(self.path)
        if LOSSES not in tensors or not self._description.keys() <= metadata.keys():
            raise ModelError(f"{self.path} contains a context, but not the state of a training: choose another file")
        differences = [
            _HASHED.get(key, f"{key} {metadata[key]} instead of {value}")
            for key, value in self._description.items()
            if metadata[key] != value and key not in ("model", "classes", "images")
        ]
        if differences:
            raise ValueError(
                f"{self.path} is from a training with {', '.join(differences)}: choose another file, or delete "
                "this one to start again"
            )
        context = tensors[CONTEXT].to(like)
        momentum = tensors.get(MOMENTUM, torch.zeros_like(context)).to(like)
        return _TrainingState(context, momentum, tuple(tensors[LOSSES].tolist()))

    def write(self, state: _TrainingState, epochs: int) -> None:
        """Replace the last state by this one; a finished training needs no momentum any more."""
        unfinished = {MOMENTUM: state.momentum} if len(state.losses) < epochs else {}
        losses = torch.tensor(state.losses, dtype=torch.float64)
        more = {START: self._start, LOSSES: losses, **unfinished}
        save_context(self.path, state.context, self._description, **more)
