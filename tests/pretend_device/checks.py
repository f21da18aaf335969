"""Everything that computes, on pretended devices: `python checks.py FOLDER` prints what was found as JSON.

Each check is a function of a folder to write to; `test_pretend_device.py` says what its result must be. All models are
tiny, so that this takes a minute.
"""

# ruff: noqa: I001
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from pretend_device.devices import COUNTS, PEAK_MEMORY, DeviceTensor, MixedDevicesError, RaceError, pretended

import asyncio
import io
import json
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from conftest import make_image
from evaluate.runs import CLASSES, content, four_blocks, make_dataset
from usetta import bench, methods
from usetta.batch.runner import BatchSettings
from usetta.batch.runner import classify as classify_into
from usetta.classifier import Classifier
from usetta.text_head import TextHead
from usetta.coop import CoOpRecipe, train_context
from usetta.doctor import diagnose
from usetta.episode import Episode
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.models import load_model
from usetta.models.checkpoints import save_model
from usetta.models.clip import CLIP
from usetta.pipeline import ImageRequest, Pipeline
from usetta.serve.monitoring import ServerMetrics
from usetta.serve.parsing import Upload
from usetta.serve.prompt_cache import PromptKey
from usetta.serve.service import ModelService
from usetta.serve.settings import Settings
from usetta.serve.worker import ClassifyTask
from usetta.views import ViewRecipe, make_views
from usetta.views.device import ViewPlan

IMAGES = [make_image(i, (40 + 5 * i, 60 - 3 * i)) for i in range(2)]
VIEWS = 16
CHECKS: dict[str, Callable[[Path], Any]] = {}


def check(work: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CHECKS[work.__name__] = work
    return work


@cache
def model(device: str = "cpu", seed: int = 0) -> CLIP:
    return four_blocks(seed).to(device)


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest between two lists of probabilities; infinite if an answer is another."""
    a, b = np.stack(list(ours)), np.stack(list(theirs))
    return float(np.abs(a - b).max()) if (a.argmax(-1) == b.argmax(-1)).all() else float("inf")


def probabilities(tower: CLIP, method: str = "se", **settings: Any) -> Any:
    classifier = Classifier(CLASSES, tower, method, **{"views": VIEWS, **settings})
    return classifier.predict_proba(IMAGES, progress=False)


@cache
def answers(device: str, reward_device: str, augmix: bool) -> dict[str, list[Any]]:
    """Of all methods, from one encoding of the views."""
    tower, judge = model(device), model(reward_device, 1)
    recipe = ViewRecipe(VIEWS, 32, augmix=augmix)
    requests = (ImageRequest(image, recipe, hidden=True, reward=True) for image in IMAGES)
    episodes = [e for e in Pipeline(tower, reward_model=judge).stream(requests) if isinstance(e, Episode)]
    head = TextHead(CLASSES, tower, reward_model=judge)
    return {
        name: [result.probs.numpy() for result in head.answer(methods.get(name), episodes)] for name in methods.names()
    }


def all_methods(device: str, reward_device: str, *, augmix: bool = False) -> dict[str, float]:
    expected = answers("cpu", "cpu", augmix)
    with pretended(torch.device(device).type):
        found = answers(device, reward_device, augmix)
    return {name: difference(found[name], expected[name]) for name in expected}


@check
def strictness(_: Path) -> dict[str, bool]:
    """The pretended devices refuse what real ones do; else all else would show nothing."""

    def refused(error: type[Exception], work: Callable[[], object]) -> bool:
        try:
            work()
        except error:
            return True
        return False

    def race() -> None:
        stream = torch.cuda.Stream("cuda")
        with torch.cuda.stream(stream):
            made = torch.ones(3, device="cuda") * 2
        made + 1

    def ordered() -> None:
        stream = torch.cuda.Stream("cuda")
        with torch.cuda.stream(stream):
            made = torch.ones(3, device="cuda") * 2
        torch.cuda.current_stream().wait_event(stream.record_event())
        made + 1

    with pretended():
        x = torch.ones(2, 2, device="cuda")
        found = {
            "is on the device": isinstance(x, DeviceTensor) and str(x.device) == "cuda:0",
            "host and device": refused(MixedDevicesError, lambda: x @ torch.ones(2, 2)),
            "two devices": refused(MixedDevicesError, lambda: x + torch.ones(2, 2, device="cuda:1")),
            "numpy": refused(TypeError, x.numpy),
            "race": refused(RaceError, race),
            "no race": not refused(RaceError, ordered),
        }
        COUNTS.clear()
        torch.nn.functional.relu(x @ x + 1).sum().item()
        found["counts"] = sum(COUNTS.launches.values()) == 4 and dict(COUNTS.syncs) == {"_local_scalar_dense": 1}
    with pretended("mps"):
        found["float64 on MPS"] = refused(TypeError, lambda: torch.ones(2, device="mps").double())
    return found


@check
def methods_on_cuda(_: Path) -> dict[str, float]:
    return all_methods("cuda", "cuda")


@check
def methods_with_a_reward_model_on_another_gpu(_: Path) -> dict[str, float]:
    return all_methods("cuda:1", "cuda:0", augmix=True)


@check
def methods_on_mps(_: Path) -> dict[str, float]:
    return all_methods("mps", "mps")


@check
def views(_: Path) -> dict[str, float]:
    """Share of the values of views that differ from the host's."""
    found = {}
    for kind, augmix in (("cuda", False), ("cuda", True), ("mps", False)):
        recipe = ViewRecipe(VIEWS, 32, augmix=augmix)
        with pretended(kind):
            made = [
                ViewPlan(image, "id", recipe, pin=kind == "cuda").make(torch.device(kind)).cpu() for image in IMAGES
            ]
        expected = [make_views(image, "id", recipe) for image in IMAGES]
        found[f"{kind}, augmix={augmix}"] = float((torch.stack(made) != torch.stack(expected)).float().mean())
    return found


@check
def adaptive(_: Path) -> dict[str, float]:
    found = {}
    for name in ("se", "use"):
        expected = probabilities(model(), name, views="adaptive")
        with pretended():
            found[name] = difference(probabilities(model("cuda"), name, views="adaptive"), expected)
    return found


@check
def reward_models(folder: Path) -> dict[str, float]:
    """By name, which goes where the model is, and on the CPU."""
    name = str(save_model(model(seed=1), folder / "reward").parent)
    settings = {"precision": "fp32"}
    expected = probabilities(model(), "rlcf", reward_model=name, device="cpu", **settings)
    with pretended():
        return {
            "by name": difference(probabilities(model("cuda"), "rlcf", reward_model=name, **settings), expected),
            "on the CPU": difference(probabilities(model("cuda"), "rlcf", reward_model=model("cpu", 1)), expected),
        }


@check
def precisions(folder: Path) -> dict[str, Any]:
    """How far answers are from the CPU's, and whether a driver without a GPU knows the models of its workers."""
    name = str(save_model(model(), folder / "model").parent)
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16", "fp16", "auto"):
        with pretended():
            loaded = load_model(name, device="cuda:1", precision=precision)
            probs = probabilities(loaded)
            fingerprint = loaded.fingerprint
        # A CPU does not compute in fp16.
        expected = probabilities(load_model(name, device="cpu", precision="bf16" if precision == "bf16" else "fp32"))
        driver = load_model(name, device="cpu", precision=precision, for_device="cuda")
        found[precision] = {
            "difference": float(np.abs(probs - expected).max()),
            "is": loaded.precision,  # type: ignore[attr-defined]
            "driver": driver.fingerprint == fingerprint,
        }
    return found


@check
def eval_runs(folder: Path) -> dict[str, Any]:
    """`usetta eval` without a cache, with a new one and with a full one, and with a reward model on another GPU."""
    dataset = make_dataset(folder / "images", 3)
    names, settings = ["clip", "use", "sts", "rlcf"], EvalSettings(views=VIEWS)
    run = partial(evaluate, datasets=[dataset], methods=names, settings=settings, progress=False)
    run(model(), out=folder / "cpu", reward_model=model(seed=1))
    expected = content(folder / "cpu").rows
    found: dict[str, Any] = {}
    for kind, caches in (("cuda", (None, "cache", "cache")), ("mps", (None,))):
        for number, cache_folder in enumerate(caches):
            with pretended(kind):
                out = folder / f"{kind}-{number}"
                reward = model("cuda:1" if kind == "cuda" else kind, 1)
                place = folder / cache_folder if cache_folder else None
                summary = run(model(kind), out=out, reward_model=reward, cache=place)
            rows = content(out).rows
            same = [row.prediction for row in rows] == [row.prediction for row in expected]
            off = max(abs(ours.confidence - row.confidence) for ours, row in zip(rows, expected, strict=True))
            found[out.name] = {"same": same, "difference": off, "encoded": summary.encoded}
    return found


@check
def classify_out(folder: Path) -> dict[str, float]:
    make_dataset(folder / "images", 3)
    settings = BatchSettings(CLASSES, methods.get("use"), ("a photo of a {}.",), views=VIEWS)

    def confidences(device: str) -> list[tuple[str, float]]:
        from pyarrow import parquet

        out = folder / device
        classify_into(model(device), settings, [str(folder / "images")], out)
        return sorted((row["key"] + row["label"], row["confidence"]) for row in parquet.read_table(out).to_pylist())

    expected = confidences("cpu")
    with pretended():
        found = confidences("cuda")
    assert [row[0] for row in found] == [row[0] for row in expected]
    return {"difference": max(abs(a[1] - b[1]) for a, b in zip(found, expected, strict=True))}


@check
def server(_: Path) -> dict[str, Any]:
    """The thread that owns the model, asked by several callers at a time."""

    def file(image: Any) -> bytes:
        stored = io.BytesIO()
        image.save(stored, "PNG")
        return stored.getvalue()

    uploads = [Upload(f"{i}.png", str(i), file(image)) for i, image in enumerate(IMAGES)]

    async def ask(service: ModelService, **task: Any) -> list[Any]:
        key = PromptKey(service.default, CLASSES, None)
        recipes = methods.get("use"), methods.get("se")
        asked = (service.answer(ClassifyTask(key, recipes, VIEWS, **task), upload) for upload in uploads)
        return list(await asyncio.gather(*asked))

    def all_answers(device: str) -> dict[str, list[Any]]:
        service = ModelService(Settings(), ServerMetrics(), model(device))
        service.start()
        while not service.is_ready:
            if service.failure:
                raise service.failure
            time.sleep(0.01)
        tasks: dict[str, dict[str, Any]] = {"all views": {}, "adaptive": {"adaptive": True}}
        found = {name: asyncio.run(ask(service, **task)) for name, task in tasks.items()}
        service.stop()
        return {name: [p.probs for _, predictions in rows for p in predictions] for name, rows in found.items()}

    expected = all_answers("cpu")
    with pretended():
        found = all_answers("cuda")
    return {name: difference(found[name], expected[name]) for name in expected}


@check
def coop(_: Path) -> dict[str, float]:
    recipe = CoOpRecipe(shots=1, views=2, batch_size=2, epochs=2, lr=0.1)
    learn = partial(train_context, images=IMAGES, labels=[0, 1], classes=CLASSES[:2], recipe=recipe, progress=False)
    expected = learn(model())
    found = {}
    for kind in ("cuda", "mps"):
        with pretended(kind):
            found[kind] = float((learn(model(kind)).cpu() - expected).abs().max())
    return found


@check
def benchmark(folder: Path) -> dict[str, Any]:
    """`usetta bench` waits for the device before it reads the clock, and reports its memory."""
    job = bench.BenchSettings(str(save_model(model(), folder / "model").parent), classes=5, views=8, device="cuda")
    with pretended() as counts, redirect_stdout(io.StringIO()) as output:
        costs = bench.measure(job, ["se", "use"], repeat=1, memory=False)
        waited = counts.syncs["synchronize"]
        bench._main([json.dumps(vars(job)), "se"])
    clocks = 2 * (len(costs.stages) + len(costs.seconds))
    return {"waits": waited == clocks, "device": costs.device, "memory": int(output.getvalue()) == PEAK_MEMORY}


@check
def doctor(_: Path) -> dict[str, Any]:
    with pretended():
        return {row.name: row.passed or row.detail for row in diagnose().checks}


@check
def overlap(_: Path) -> str:
    """The order in which a device is given images (e) and the host waits for answers (r): eerererr, not ererer."""
    import usetta.pipeline

    usetta.pipeline._DEVICE_VIEWS = 2 * VIEWS  # two images fill a batch
    images = [make_image(i) for i in range(8)]
    with pretended() as counts:
        classifier = Classifier(CLASSES, model("cuda"), "se", views=VIEWS, batch_size=2)
        classifier.predict_proba(images[:2], progress=False)  # what is done once for a class list
        counts.clear()
        classifier.predict_proba(images, progress=False)
    usetta.pipeline._DEVICE_VIEWS = 512
    marks = {"convolution": "e", "sync: read": "r"}
    order = [marks[event] for event in counts.events if event in marks]
    # The weak views of a batch and the strong ones are a convolution each.
    return "".join(order).replace("ee", "e")


@check
def costs(_: Path) -> dict[str, Any]:
    """Launches and waits for an image of 16, end to end."""
    images = [make_image(i) for i in range(16)]
    found = {}
    for name in ("se", "mta", "use:skip=false"):
        with pretended() as counts:
            classifier = Classifier(CLASSES, model("cuda"), name, views=VIEWS, batch_size=16)
            classifier.predict_proba(images[:2], progress=False)  # what is done once for a class list
            counts.clear()
            classifier.predict_proba(images, progress=False)
            found[name] = {
                "launches": sum(counts.launches.values()) / 16,
                "syncs": sum(counts.syncs.values()) / 16,
                "reasons": dict(counts.syncs),
            }
    return found


def main(folder: Path, names: Sequence[str]) -> None:
    results: dict[str, Any] = {}
    for name in names or CHECKS:
        (folder / name).mkdir()
        try:
            results[name] = CHECKS[name](folder / name)
        except Exception:  # noqa: BLE001 - it fails the tests of this check alone
            results[name] = traceback.format_exc()
        print(f"{name}: {results[name]}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
