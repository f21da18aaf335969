"""Views made on a device, and whether they keep it busy: `python -m benchmarks.views [--json]`.

There is no GPU here. That views made by tensor operations equal the host's is shown on the CPU; launches and uploads
are counted by a pretended GPU (`tests/pretend_device`). Whether images are opened and planned fast enough is simulated:
the image tower is a stand-in that sleeps, beside the host as a GPU works, and making views is part of its time. Real
are files, decoding, the plans of views on two threads of the host, and the answers. Whatever else this machine computes
makes `busy` smaller.
"""

# ruff: noqa: I001
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pretend_device.devices import pretended  # before torch

import argparse
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import log, show
from usetta import methods
from usetta.data import Dataset
from usetta.evaluate.worker import DatasetJob, EvalWorker, WorkImage, WorkItem
from usetta.models.clip import CLIP, random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.pipeline import EncodeLaunch, PendingImage, Pipeline
from usetta.timing import class_names, generated_image, generated_jpeg, shortest_in_turns
from usetta.views import ViewRecipe, make_views
from usetta.views.device import ViewPlan

SHAPES = ((500, 375), (375, 500), (224, 224), (1200, 900), (640, 480), (90, 1800), (60, 45))
RATES = (47, 125)
"""Images of 64 views per second: ViT-L/14 and ViT-B/16 on a large GPU."""
TARGETS = {
    "device_views_exact": ("share of the values of views that are the host's", "= 1"),
    "launches": ("launches for 64 views of an image", ""),
    "launches_augmix": ("the same with AugMix", ""),
    "uploaded_mb": ("megabytes uploaded for 64 views of an image of 500×375", ""),
    "views_mb": ("megabytes of the views themselves", ""),
    "device_over_host": ("time of views by tensor operations ÷ by Pillow, on this CPU", ""),
    "device_over_host_augmix": ("the same with AugMix", ""),
    **{
        f"busy_{rate}": (f"share of the time that a tower of {rate} images/s works in `eval`", "≥ 0.95")
        for rate in RATES
    },
    **{f"busy_{rate}_augmix": ("the same with AugMix", "≥ 0.95") for rate in RATES},
}


def exactness() -> float:
    """Share of equal values, over shapes, with and without AugMix."""
    equal = total = 0
    for seed, shape in enumerate(SHAPES):
        image = generated_image(seed, shape)
        for augmix in (False, True):
            recipe = ViewRecipe(16, augmix=augmix, seed=seed)
            expected = make_views(image, "id", recipe)
            equal += int((ViewPlan(image, "id", recipe).make(torch.device("cpu")) == expected).sum())
            total += expected.numel()
    return equal / total


def counted(augmix: bool) -> tuple[int, float, float]:
    """Launches, megabytes uploaded and megabytes of the result for 64 views of an image."""
    with pretended() as counts:
        ViewPlan(generated_image(0), "warm up", ViewRecipe(augmix=augmix)).make(
            torch.device("cuda")
        )  # tables of angles
        counts.clear()
        views = ViewPlan(generated_image(0), "id", ViewRecipe(augmix=augmix)).make(torch.device("cuda"))
        return sum(counts.launches.values()), counts.uploaded / 1e6, views.nbytes / 1e6


def device_over_host(augmix: bool, rounds: int) -> float:
    """How much longer tensor operations take on this CPU, for several images."""
    images, recipe = [generated_image(seed) for seed in range(4)], ViewRecipe(augmix=augmix)

    def by_host() -> None:
        for image in images:
            make_views(image, "id", recipe)

    def by_tensors() -> None:
        for image in images:
            ViewPlan(image, "id", recipe).make(torch.device("cpu"))

    host, tensors = shortest_in_turns([by_host, by_tensors], rounds)
    return tensors / host


class SleepingTower:
    """A model whose image tower takes its time in a thread of its own, as a GPU does, and knows nothing.

    Views would be in the memory of the GPU; here one pixel stands for each, so that this CPU copies none.
    """

    image_size = 1

    def __init__(self, model: CLIP, rate: float, views: int) -> None:
        self._model = model
        self._seconds_per_view = 1 / (rate * views)
        self._work: SimpleQueue[tuple[float, threading.Event]] = SimpleQueue()
        self._worked, self._since = 0.0, math.inf
        threading.Thread(target=self._sleep, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.given(len(pixels))
        return torch.nn.functional.normalize(torch.randn(len(pixels), self._model.embed_dim), dim=-1)

    def worked(self) -> float:
        """Seconds of work up to now."""
        return self._worked + max(0.0, time.perf_counter() - self._since)

    def given(self, views: int) -> threading.Event:
        """Work for so many views, and when it is done."""
        done = threading.Event()
        self._work.put((views * self._seconds_per_view, done))
        return done

    def _sleep(self) -> None:
        while True:
            seconds, done = self._work.get()
            self._since = time.perf_counter()
            time.sleep(seconds)
            self._worked, self._since = self.worked(), math.inf
            done.set()


class DevicePipeline(Pipeline):
    """Batches images and plans views as on a GPU; an answer has to wait for the tower."""

    batches_images = True  # type: ignore[assignment]

    def __init__(self, tower: SleepingTower) -> None:
        super().__init__(tower)
        self._tower = tower
        self._marks: deque[threading.Event] = deque()

    def launch(self, images: Sequence[PendingImage], *, share_cores: bool = False) -> EncodeLaunch:
        launched = super().launch(images, share_cores=share_cores)
        self._marks.append(self._tower.given(0))
        return launched

    def finish(self, launch: EncodeLaunch) -> None:
        self._marks.popleft().wait()
        super().finish(launch)


def busy(folder: Path, rate: float, augmix: bool, images: int) -> float:
    """Share of its time that the tower works, from the first work it gets to the last answer."""
    ids = tuple(f"{number}.jpg" for number in range(images))
    for number, name in enumerate(ids[:16]):
        (folder / name).write_bytes(generated_jpeg(number))
    for number, name in enumerate(ids):
        if not (folder / name).exists():
            (folder / name).write_bytes((folder / ids[number % 16]).read_bytes())
    names = tuple(class_names(100))
    dataset = Dataset("images", "Images", "other", names, ids, (0,) * images, folder, "generated")
    config = CLIPConfig(64, ViTConfig(224, 32, width=64, layers=1, heads=1), TextConfig(width=64, layers=1, heads=1))
    views = ViewRecipe(augmix=augmix)
    tower = SleepingTower(random_model(config, name="stand-in"), rate, views.views)
    job = DatasetJob(dataset, {"se": methods.get("se")}, views, ["a photo of a {}."])
    items = [
        WorkItem("images", 0, tuple(WorkImage(name, 0, ("se",)) for name in ids[first : first + 16]))
        for first in range(0, images, 16)
    ]
    worker = EvalWorker(DevicePipeline(tower), {"images": job})
    outcomes = worker.run(items)
    next(outcomes)  # the first batch fills the pipe
    started, before = time.perf_counter(), tower.worked()
    for _ in outcomes:
        pass
    return (tower.worked() - before) / (time.perf_counter() - started)


def measure(rounds: int) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {"device_views_exact": exactness()}
    figures["launches"], figures["uploaded_mb"], figures["views_mb"] = counted(False)
    figures["launches_augmix"] = counted(True)[0]
    for augmix, suffix in ((False, ""), (True, "_augmix")):
        figures[f"device_over_host{suffix}"] = device_over_host(augmix, rounds)
    make = ViewPlan.make
    ViewPlan.make = lambda plan, device: torch.zeros(plan.recipe.views, 3, 1, 1)  # type: ignore
    try:
        for rate in RATES:
            for augmix, suffix in ((False, ""), (True, "_augmix")):
                with TemporaryDirectory() as folder:
                    figures[f"busy_{rate}{suffix}"] = busy(Path(folder), rate, augmix, images=16 * (rate // 8))
                log(f"{rate} images/s{suffix}: {figures[f'busy_{rate}{suffix}']:.1%} busy")
    finally:
        ViewPlan.make = make  # type: ignore[method-assign]
    return {name: figures[name] for name in TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(measure(options.rounds), TARGETS, as_json=options.json)


if __name__ == "__main__":
    main()
