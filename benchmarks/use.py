"""What USE costs on top of encoding the views, and what the published code costs: `python -m benchmarks.use [--json]`.

ViT-B/16 with random weights in float32. One image that is not skipped, on 64 views; text features and the graph at
the initial prompt are constants of the class list, so they are made before the clock starts. Everything is a ratio of
figures from one run: absolute times of one machine say little about another.

The published code is modelled on its essentials: 30 tokens a class, all 64 views in one batch, autograd through both
towers with nothing frozen, and all views encoded again after the step. Its second pass builds no graph here, in its
favour. Peak memory is that of a process of its own for each way of working. Takes about five minutes on two cores.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import load, show
from usetta import methods
from usetta.evaluate.provenance import peak_memory
from usetta.methods.losses import reverse_cross_entropy
from usetta.methods.recipe import run
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, run_alone, shortest, speedup

ACTIVE = 64
TARGETS = {
    "use_over_views_100": ("USE ÷ encoding 64 views, 100 classes", "≤ 1.06"),
    "use_over_views_1000": ("USE ÷ encoding 64 views, 1000 classes", "≤ 1.40"),
    "use_over_views_1000_active": (f"the same, {ACTIVE} active classes", "≤ 1.10"),
    "published_over_views_100": ("published code ÷ encoding 64 views, 100 classes", ""),
    "text_forward_speedup": ("text forward, 100 classes, against 30 tokens", "≥ 6"),
    "context_gradient_speedup": ("gradient at the initial prompt, against 30 tokens", "≥ 10"),
    "memory_ratio": ("peak memory of USE ÷ encoding 64 views, 100 classes", "≤ 1.25"),
    "memory_ratio_1000": ("the same, 1000 classes", ""),
    "memory_ratio_published": ("the same, published code, 100 classes", ""),
}


def views(model: CLIP) -> Tensor:
    """64 views of noise."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (64, 3, model.image_size, model.image_size), dtype=torch.uint8, generator=generator)


class Published:
    """The text side of the published code: the context spliced into 30 tokens of every class."""

    def __init__(self, model: CLIP, names: list[str]) -> None:
        self._tower = model.text
        self._ids = model.text.tokenize([f"a photo of a {name}." for name in names])[:, :30]
        self._words = model.text.embed(self._ids).detach()
        self.context = self._words[0, 1:5].clone().requires_grad_()

    def text(self) -> Tensor:
        """Text features (C, D) at the current context."""
        context = self.context.expand(len(self._words), -1, -1)
        spliced = torch.cat([self._words[:, :1], context, self._words[:, 5:]], 1)
        return self._tower.encode(spliced, self._ids)

    def gradient(self, grad: Tensor) -> Tensor:
        """Forward and backward pass, with the weights frozen: gradient with respect to the context."""
        (gradient,) = torch.autograd.grad(self.text(), self.context, grad)
        return gradient


def published_use(model: CLIP, pixels: Tensor, names: list[str]) -> Tensor:
    """USE on one image as the published code does it."""
    model.requires_grad_(True)
    prompt = Published(model, names)
    optimizer = torch.optim.AdamW([prompt.context], lr=5e-3)

    def logits() -> Tensor:
        features = torch.nn.functional.normalize(model.image_features(model.normalize(pixels)), dim=-1)
        return model.logit_scale * features @ prompt.text().T

    first = logits()
    probs = first.softmax(-1)
    entropies = -(probs * first.log_softmax(-1)).sum(-1).detach()
    chosen = 1 + entropies[1:].argsort()[:6]
    beta = 0.5 + 0.4 * ((entropies[1:] > entropies[0]).float().mean() - 0.5)
    pseudo_label = (beta * probs[0] + (1 - beta) * probs[chosen].mean(0)).detach()
    members = torch.cat([torch.zeros(1, dtype=torch.long), chosen])
    reverse_cross_entropy(first[None, members], pseudo_label[None]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with torch.no_grad():
        after = logits().softmax(-1)
    return beta * after[0] + (1 - beta) * after[chosen].mean(0)


def measure_times(repeat: int) -> dict[str, float]:
    """Ratios of times."""
    model = load()
    pixels = views(model)
    features = model.encode_images(pixels)[None]
    encode = shortest(lambda: model.encode_images(pixels), repeat, warm_up=False)
    figures = {}
    for count, settings in ((100, ""), (1000, ""), (1000, f":active={ACTIVE}")):
        prompts, recipe = ClassPrompts(model.text, class_names(count)), methods.get(f"use:skip=false{settings}")
        tune = shortest(lambda p=prompts, r=recipe: run(r, features, p, model.logit_scale), repeat)  # type: ignore[misc]
        figures[f"use_over_views_{count}{'_active' if settings else ''}"] = 1 + tune / encode
    prompts, naive = ClassPrompts(model.text, class_names(100)), Published(model, class_names(100))
    other, grad = prompts.context[None] + 5e-3, torch.randn(prompts.features().shape)
    with torch.no_grad():
        figures["text_forward_speedup"] = speedup(naive.text, lambda: prompts.encode(other), 8)
    figures["context_gradient_speedup"] = speedup(lambda: naive.gradient(grad), lambda: prompts.pullback(grad[None]), 8)
    return figures


def _use_part(classes: int) -> Callable[[CLIP, Tensor], object]:
    def work(model: CLIP, pixels: Tensor) -> object:
        prompts = ClassPrompts(model.text, class_names(classes))
        return run(methods.get("use:skip=false"), model.encode_images(pixels)[None], prompts, model.logit_scale)

    return work


PARTS: dict[str, Callable[[CLIP, Tensor], object]] = {
    "views": lambda model, pixels: model.encode_images(pixels),
    "use_100": _use_part(100),
    "use_1000": _use_part(1000),
    "published": lambda model, pixels: published_use(model, pixels, class_names(100)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        model = load()
        pixels, start = views(model), time.perf_counter()
        PARTS[options.part](model, pixels)
        print(peak_memory(), time.perf_counter() - start)
        return
    # First, because the peak of a process starts from its parent's.
    parts = {part: tuple(map(float, run_alone("benchmarks.use", "--part", part))) for part in PARTS}
    memory, seconds = ({part: figures[i] for part, figures in parts.items()} for i in (0, 1))
    figures = measure_times(options.repeat)
    figures["published_over_views_100"] = seconds["published"] / seconds["views"]
    figures["memory_ratio"] = memory["use_100"] / memory["views"]
    figures["memory_ratio_1000"] = memory["use_1000"] / memory["views"]
    figures["memory_ratio_published"] = memory["published"] / memory["views"]
    show({name: figures[name] for name in TARGETS}, TARGETS, as_json=options.json, active=ACTIVE)


if __name__ == "__main__":
    main()
