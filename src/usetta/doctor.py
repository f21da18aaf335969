"""Whether this installation works: versions, devices, caches, and tests of views and devices on generated images."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from usetta.classifier import Classifier
from usetta.evaluate.provenance import provenance
from usetta.models.clip import random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.models.package_files import cache_dir
from usetta.models.precision import AUTO, prepare, resolve_precision
from usetta.views import ViewRecipe, make_views
from usetta.views.device import ViewPlan
from usetta.views.digests import EXPECTED, generated_image, view_digests

_TINY = CLIPConfig(32, ViTConfig(32, 8, width=64, layers=2, heads=2), TextConfig(width=64, layers=2, heads=2))
_CLASSES = ["cat", "dog", "red fox", "coffee cup"]
_TOLERANCE = 1e-3
"""Of probabilities in fp32, between devices. An error in the code of a device is far larger, rounding far smaller."""


_REASONS = {
    ("cpu", "fp32"): "this processor has no fast bf16",
    ("cpu", "bf16"): "this processor computes in bf16, about twice as fast as fp32, and almost all answers agree",
    ("cuda", "fp16"): "fast on every GPU",
    ("mps", "fp32"): "half precision was never measured on MPS",
}
"""Of the precision that `auto` picks on a type of device."""


@dataclass(frozen=True)
class Check:
    """A test and its result."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    versions: dict[str, Any]
    devices: list[dict[str, str]]
    caches: list[dict[str, str]]
    checks: list[Check]

    @property
    def is_well(self) -> bool:
        """Whether all tests have passed."""
        return all(check.passed for check in self.checks)


def diagnose() -> Diagnosis:
    """Look at the installation and test it. A test that fails is part of the result, not an exception."""
    devices = list(_devices())
    tests: dict[str, Callable[[], str]] = {"views": _test_views}
    for row in devices:
        device = torch.device(row["device"])
        tests[f"views made on {device}"] = partial(_test_device_views, device)
        tests[f"answers of {device}"] = partial(_test_answers, device)
    checks = [_run(name, test) for name, test in tests.items()]
    return Diagnosis(provenance(), devices, list(_caches()), checks)


def _run(name: str, test: Callable[[], str]) -> Check:
    started = time.perf_counter()
    try:
        detail = test()
    except Exception as error:  # noqa: BLE001 - whatever a device or library does wrong is what the user wants to know
        return Check(name, False, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    return Check(name, True, f"{detail} ({time.perf_counter() - started:.1f} s)")


def _test_views() -> str:
    digests = view_digests()
    wrong = [name for name, digest in digests.items() if digest != EXPECTED[name]]
    if wrong:
        raise ValueError(f"other bits than elsewhere, so results cannot be compared: {'; '.join(wrong)}")
    return f"the same bits as everywhere, {len(digests)} sets of views"


def _test_device_views(device: torch.device) -> str:
    image, details = generated_image(500, 375), []
    for augmix in (False, True):
        recipe = ViewRecipe(8, augmix=augmix)
        made, expected = ViewPlan(image, "doctor", recipe).make(device).cpu(), make_views(image, "doctor", recipe)
        different = int((made != expected).sum())
        if different > (1e-3 * made.numel() if augmix else 0):
            raise ValueError(f"{different / made.numel():.2%} of the values differ from those of the host")
        details.append(f"{different} of {made.numel():,} values differ {'with AugMix' if augmix else 'in crops'}")
    return ", ".join(details)


def _test_answers(device: torch.device) -> str:
    """A tiny model in fp32 gives the answers of the CPU, and runs in the precision that `auto` picks."""
    images = [generated_image(60, 45), generated_image(45, 60)]
    expected = _probabilities(torch.device("cpu"), "fp32", images)
    difference = float((_probabilities(device, "fp32", images) - expected).abs().max())
    if not difference <= _TOLERANCE:
        raise ValueError(f"probabilities differ from those of the CPU by up to {difference:.2g}")
    precision = resolve_precision(AUTO, device)
    if not bool(_probabilities(device, precision, images).isfinite().all()):
        raise ValueError(f"{precision} gives NaN")
    return f"SE and TPT differ from the CPU by at most {difference:.1g}; {precision} works"


def _probabilities(device: torch.device, precision: str, images: list[Any]) -> torch.Tensor:
    model = random_model(_TINY, name="tiny").to(device)
    prepare(model, precision)
    answers = [Classifier(_CLASSES, model, method, views=16).predict_proba(images) for method in ("se", "tpt")]
    return torch.from_numpy(np.concatenate(answers))


def _devices() -> Iterator[dict[str, str]]:
    cuda = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    mps = [torch.device("mps")] if torch.backends.mps.is_available() else []
    for device in (torch.device("cpu"), *cuda, *mps):
        precision = resolve_precision(AUTO, device)
        name = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            name = f"{found.name}, {found.total_memory / 1e9:.0f} GB"
        elif device.type == "mps":
            name = "Apple GPU"
        yield {"device": str(device), "what": name, "auto": precision, "why": _REASONS[device.type, precision]}


def _caches() -> Iterator[dict[str, str]]:
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    own = sorted(cache_dir().iterdir()) if cache_dir().is_dir() else [cache_dir()]
    for place in (*own, hub):
        files = (
            [file for file in place.rglob("*") if file.is_file() and not file.is_symlink()] if place.is_dir() else []
        )
        size = sum(file.stat().st_size for file in files)
        yield {"place": str(place), "files": str(len(files)), "size": f"{size / 1e6:,.0f} MB"}
