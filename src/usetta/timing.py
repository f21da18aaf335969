"""Measuring time and memory: what `usetta bench` and the programs in `benchmarks/` share.

The shortest of several runs counts, because other programs on the machine can only make a run longer. Ways of working
that are compared take turns, so that a machine that gets busy slows down all of them. Peak memory is that of a process
of its own: within one process it never falls, and a child starts from its parent's. Images and class names are made up,
but cost as much as real ones.
"""

import io
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

from usetta.models import Model, load_model
from usetta.models.devices import synchronize

# Each is one token of CLIP's.
_WORDS = """
    cat dog owl fox hen crane duck goose swan eagle hawk frog shark ray crab snail ant bee fly moth lion tiger bear
    wolf deer horse pig sheep goat cow rabbit mouse rat bat whale seal otter monkey ape panda barn boat bus car truck
    train plane ship bike cart tank van jeep church castle tower bridge wall fence gate tent house palace library
    prison school bench chair table desk sofa bed lamp clock radio phone camera piano guitar drum flute horn violin
    knife fork spoon cup bowl plate pan pot bottle glass jar bag box basket coat hat boot shoe sock glove shirt dress
    ring mask apple lemon orange banana fig corn mushroom bread pizza coffee wine tree flower daisy rose lake beach
    valley volcano cliff island
""".split()  # noqa: SIM905 - a list of 128 strings would be as many lines

_LENGTHS = [1] * 30 + [2] * 54 + [3] * 11 + [4] * 3 + [5, 7]
"""Tokens of 100 ImageNet names."""


def shortest(
    work: Callable[[], object], repeat: int, *, warm_up: bool = True, device: torch.device | None = None
) -> float:
    """Seconds of the shortest of `repeat` runs, after one to warm up. The clock waits for the device."""
    if warm_up:
        work()
    return min(_seconds(work, device) for _ in range(repeat))


def shortest_in_turns(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of the shortest run of each way; they take turns, and the first round only warms up."""
    times = [[_seconds(work) for work in ways] for _ in range(rounds + 1)]
    return [min(of_way) for of_way in zip(*times[1:], strict=True)]


def _seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    device = device or torch.device("cpu")
    synchronize(device)
    start = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - start


def speedup(slow: Callable[[], object], fast: Callable[[], object], rounds: int) -> float:
    """How many times faster `fast` is."""
    long, short = shortest_in_turns([slow, fast], rounds)
    return long / short


def run_alone(module: str, *arguments: str) -> list[str]:
    """Run a module in a process of its own, and return what the last line that it prints consists of."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"python -m {module} {' '.join(arguments)} failed: {cause}")
    return done.stdout.splitlines()[-1].split()


def load_quietly(name: str, **settings: Any) -> Model:
    """A model as `load_model` returns it, without the warning that random weights make its answers meaningless."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(name, **settings)


def generated_image(seed: int, size: tuple[int, int] = (500, 375), noise: int = 12) -> Image.Image:
    """Patches of colour with some noise, so that decoding and cropping it is as much work as with a photo."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    # The same noise in all channels, and 16 bits: an image may have 24 megapixels.
    noisy = np.asarray(coarse) + rng.integers(-noise, noise, (size[1], size[0], 1), dtype=np.int16)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def generated_jpeg(seed: int, size: tuple[int, int] = (500, 375), noise: int = 12) -> bytes:
    """The same as a file."""
    file = io.BytesIO()
    generated_image(seed, size, noise).save(file, "JPEG", quality=90)
    return file.getvalue()


def class_names(count: int) -> list[str]:
    """Different made-up names with as many tokens as ImageNet's: most have one or two, a few up to seven.

    Where words for short names run out, they get one word more.
    """
    rng = random.Random(0)  # noqa: S311
    names: dict[str, None] = {}
    while len(names) < count:
        length = _LENGTHS[len(names) % len(_LENGTHS)]
        name = " ".join(rng.sample(_WORDS, length))
        while name in names:
            length += 1
            name = " ".join(rng.sample(_WORDS, length))
        names[name] = None
    return list(names)
