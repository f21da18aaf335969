"""Learned contexts: files of every kind, good and bad, and learning against a loop written by the definition."""

import os
import pickle
import random
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import usetta.coop.train as train_module
from models.tiny import TINY_VIT, disturbed
from usetta.coop import CoOpRecipe, load_context, save_context, template_for, template_of, train_context
from usetta.coop.context import read_context_file
from usetta.coop.shots import draw_shots, encode_shots, generator
from usetta.data import load_dataset
from usetta.feature_cache import FeatureCache
from usetta.models import ModelError, load_model
from usetta.models.clip import CLIP, TextTransformer
from usetta.prompts import ClassPrompts

CLASSES = ["house", "owl", "red fox"]
COLOURS = [[200, 40, 40], [40, 200, 40], [40, 40, 200]]
QUICK = CoOpRecipe(shots=6, views=3, batch_size=8, epochs=4, lr=0.1)


def image(label: int, number: int) -> Image.Image:
    """Noise around the colour of its class."""
    noise = np.random.default_rng([label, number]).integers(-40, 40, (40, 48, 3))
    return Image.fromarray(np.clip(COLOURS[label] + noise, 0, 255).astype(np.uint8))


IMAGES = [image(label, number) for label in range(3) for number in range(7)]
LABELS = [label for label in range(3) for _ in range(7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The images by class."""
    for i, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        path = tmp_path / "shots" / CLASSES[label].replace(" ", "_") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return tmp_path / "shots"


def learn(model: CLIP, out: Path | None = None, recipe: CoOpRecipe = QUICK, **more: Any) -> Tensor:
    return train_context(model, IMAGES, LABELS, CLASSES, recipe, out=out, **{"log": lambda _: None, **more})


def naive(tower: TextTransformer, names: Sequence[str], context: Tensor) -> Tensor:
    """Text features (C, D): `context` (n, W) between the start token and the name, in full length."""
    ids = tower.tokenize([" ".join(["x"] * len(context)) + f" {name}." for name in names])
    words = tower.embed(ids)
    hidden = torch.cat([words[:, :1], context.expand(len(ids), -1, -1), words[:, 1 + len(context) :]], 1)
    hidden = hidden + tower.positional_embedding
    for block in tower.blocks:
        hidden = block(hidden)
    last = hidden[torch.arange(len(ids)), ids.argmax(-1)]
    return normalize(tower.ln_final(last) @ tower.projection, dim=-1)


class WarmUp(CosineAnnealingLR):
    """As Dassl's: a scheduler whose state holds the next scheduler as an object."""

    def __init__(self, optimizer: SGD, successor: CosineAnnealingLR) -> None:
        self.successor = successor
        super().__init__(optimizer, 50)


def published(context: Tensor, **more: Any) -> dict[str, Any]:
    """What CoOp's trainer saves: state dict, epoch, optimiser, scheduler, validation result."""
    learner = torch.nn.Module()
    learner.ctx = torch.nn.Parameter(context)
    learner.register_buffer("token_prefix", torch.ones(3, 1, context.shape[-1], dtype=context.dtype))
    learner.register_buffer("token_suffix", torch.ones(3, 5, context.shape[-1], dtype=context.dtype))
    optimizer = SGD(learner.parameters(), lr=0.002, momentum=0.9, weight_decay=5e-4)
    scheduler = WarmUp(optimizer, CosineAnnealingLR(optimizer, 50))
    learner.ctx.grad = torch.ones_like(learner.ctx)
    optimizer.step()
    scheduler.step()
    return {
        "state_dict": learner.state_dict(),
        "epoch": 50,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "val_result": np.float64(71.9),
        **more,
    }


def some_context(tokens: int = 4, width: int = 64) -> Tensor:
    return 0.02 * torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens))


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_published_checkpoint_is_read_with_all_that_is_in_it(
    tmp_path: Path, dtype: torch.dtype, as_zip: bool
) -> None:
    content = published(some_context().to(dtype))
    path = tmp_path / "model.pth.tar-50"
    torch.save(content, path, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    allowed = set(torch.serialization.get_safe_globals())
    context = load_context(path)
    assert context.dtype == torch.float32
    assert not context.requires_grad
    assert torch.equal(context, content["state_dict"]["ctx"].float())
    assert template_of(path) == "a photo of a {}."
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize("module", [b"numpy._core.multiarray", b"numpy.core.multiarray"])
def test_numpy_scalars_of_old_and_new_versions_are_no_obstacle(tmp_path: Path, module: bytes) -> None:
    path, state = tmp_path / "model.pth.tar-50", {"ctx": some_context()}
    content = {"state_dict": state, "best_acc": np.float32(1.5), "count": np.int64(3), "val_result": np.float64(2)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()
    assert written.count(b"multiarray\nscalar") == 1
    path.write_bytes(re.sub(rb"numpy\.\w+\.multiarray", module, written))
    assert torch.equal(load_context(path), state["ctx"])


def test_a_bare_state_dict_will_do(tmp_path: Path) -> None:
    torch.save(OrderedDict(ctx=some_context()), tmp_path / "ctx.pt")
    save_file({"ctx": some_context()}, tmp_path / "ctx.safetensors")
    for name in ("ctx.pt", "ctx.safetensors"):
        assert torch.equal(load_context(tmp_path / name), some_context())


class Malicious:
    """Unpickled without care, it makes a file."""

    def __init__(self, flag: Path, by: str) -> None:
        self.flag, self.by = flag, by

    def __reduce__(self) -> tuple[Any, ...]:
        if self.by == "system":
            return os.system, (f"touch {self.flag}",)
        return eval, (f"open({str(self.flag)!r}, 'w').close()",)


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize(("by", "name"), [("system", r"(posix|nt)\.system"), ("eval", "eval")])
def test_a_malicious_checkpoint_is_refused_and_not_run(tmp_path: Path, by: str, name: str, as_zip: bool) -> None:
    path, flag = tmp_path / "model.pth.tar-50", tmp_path / "flag"
    content = published(some_context(), val_result=Malicious(flag, by))
    torch.save(content, path, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(ModelError, match=rf"tar-50 contains {name}, .* the file is not used"):
        load_context(path)
    assert not flag.exists()
    torch.load(path, weights_only=False)
    assert flag.exists(), "the test must be able to see what the file would do"


def test_an_object_that_a_checkpoint_may_hold_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(published(some_context()), tmp_path / "model.pth.tar-50")
    for method in ("__setstate__", "__init__"):
        monkeypatch.setattr(SGD, method, None)
    monkeypatch.setattr(CosineAnnealingLR, "__init__", None)
    assert load_context(tmp_path / "model.pth.tar-50").shape == (4, 64)


def damaged_files() -> dict[str, tuple[object, str]]:
    full = some_context()
    return {
        "an empty file": (b"", "is damaged, or not a file with a learned context"),
        "a web page": (b"<!DOCTYPE html><html><body>404</body></html>", "is damaged, or not a file with a learned"),
        "a text": (b"hello", "is damaged, or not a file with a learned context"),
        "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        "a bad header": (b"\x08\0\0\0\0\0\0\0{broken}", "is damaged, perhaps cut off"),
        "a number": (3, "contains a int, not a context"),
        "no context": ({"state_dict": {"weight": full}}, "contains no context: it has neither 'ctx'"),
        "no tensor": ({"state_dict": {"ctx": [1.0, 2.0]}}, "its 'ctx' is a list"),
        "a context for each class": ({"ctx": torch.ones(10, 4, 64)}, "for each of 10 classes; only one shared by all"),
        "a vector": ({"ctx": torch.ones(64)}, r"must be a context of floats .*, not torch.float32 of shape \(64,\)"),
        "no tokens": ({"ctx": torch.ones(0, 64)}, r"of shape \(0, 64\)"),
        "integers": ({"ctx": torch.ones(4, 64, dtype=torch.long)}, r"not torch.int64 of shape \(4, 64\)"),
        "NaN": ({"ctx": full.clone().fill_diagonal_(torch.nan)}, "has NaN or infinite values"),
        "infinity": ({"ctx": full.half() * 1e9}, "has NaN or infinite values"),
        "CoCoOp": (
            {"state_dict": {"ctx": full, "meta_net.linear1.weight": full, "token_prefix": full}},
            r"contains more than a context \(meta_net.linear1.weight\)",
        ),
    }


@pytest.mark.parametrize("kind", damaged_files())
def test_other_files_are_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    content, reason = damaged_files()[kind]
    path = tmp_path / "context.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ModelError, match=f"context.pt .*{reason}|context.pt {reason}"):
        load_context(path)


def test_places_without_a_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere.pt does not exist"):
        load_context(tmp_path / "nowhere.pt")
    with pytest.raises(ModelError, match="is not a file"):
        load_context(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_damage_anywhere_is_found_or_does_no_harm(tmp_path: Path, kind: str) -> None:
    path, rng = tmp_path / "context", random.Random(0)
    if kind == "safetensors":
        save_context(path, some_context(), {"template": "a photo of a {}."})
    else:
        torch.save(published(some_context()), path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    for attempt in range(200):
        content = bytearray(whole[: rng.randrange(len(whole))] if attempt % 2 else whole)
        for _ in range(0 if attempt % 2 else rng.choice([1, 8])):
            content[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            context = load_context(path)
        except ModelError:
            continue
        assert context.dtype in (torch.float32, torch.float64)
        assert context.ndim == 2
        assert context.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_saved_is_read_again(tmp_path: Path, dtype: torch.dtype) -> None:
    path, context = tmp_path / "new" / "context.safetensors", some_context(16).to(dtype)
    save_context(path, context.requires_grad_(), {"template": "an icon of {}", "shots": 16})
    assert torch.equal(load_context(path), context.detach().to(torch.promote_types(dtype, torch.float32)))
    assert template_of(path) == "an icon of {}"
    with safe_open(path, "pt") as file:
        assert file.metadata()["shots"] == "16"
        assert file.metadata()["usetta"]
    assert [p.name for p in path.parent.iterdir()] == ["context.safetensors"]


def test_a_bad_context_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the context has NaN"):
        save_context(tmp_path / "context.safetensors", torch.full((4, 8), torch.nan))
    with pytest.raises(ModelError, match=r"the context must be .* not torch.float32 of shape \(8,\)"):
        save_context(tmp_path / "context.safetensors", torch.ones(8))
    assert not list(tmp_path.iterdir())


def test_a_template_has_as_many_words_as_the_context(tiny_model: CLIP, tmp_path: Path) -> None:
    assert template_for(some_context(4)) == "a photo of a {}."
    assert template_for(some_context(2)) == "X X {}."
    long = some_context(16)
    torch.save({"state_dict": {"ctx": long}}, tmp_path / "model.pth.tar-50")
    prompts = ClassPrompts(tiny_model.text, CLASSES, template_of(tmp_path / "model.pth.tar-50"), context=long)
    torch.testing.assert_close(prompts.features(), naive(tiny_model.text, CLASSES, long), atol=1e-6, rtol=0)


def test_a_context_from_a_file_reaches_the_features(tmp_path: Path) -> None:
    tower, context = disturbed(TINY_VIT).text, some_context(width=32)
    torch.save(published(context), tmp_path / "model.pth.tar-50")
    loaded = load_context(tmp_path / "model.pth.tar-50")
    features = ClassPrompts(tower, CLASSES, context=loaded).features()
    torch.testing.assert_close(features, naive(tower, CLASSES, loaded), atol=1e-6, rtol=0)
    assert (features - ClassPrompts(tower, CLASSES).features()).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_context_of_another_tower_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    own, other = disturbed(TINY_VIT, seed=0), disturbed(TINY_VIT, seed=5)
    context = some_context(width=32)
    start = own.text.embed(own.text.tokenize(["cat"]))[:, :1].to(dtype)
    theirs, ours = tmp_path / "model.pth.tar-50", tmp_path / "context.safetensors"
    torch.save({"state_dict": {"ctx": context, "token_prefix": start}}, theirs)
    save_context(ours, context, {"model": "the first"}, start_token=start[0, 0])
    for path in (theirs, ours):
        assert torch.equal(load_context(path, own), context)
        assert torch.equal(load_context(path, own.to(torch.bfloat16)), context)
        own.float()
        assert torch.equal(load_context(path), context)
        with pytest.raises(ModelError, match="was learned for a different text encoder than that of tiny"):
            load_context(path, other)
    with pytest.raises(ModelError, match=r"\(it was learned with the first\)"):
        load_context(ours, other)


def test_a_context_of_another_width_is_refused(tiny_model: CLIP, tmp_path: Path) -> None:
    save_context(tmp_path / "context.safetensors", some_context(width=512))
    with pytest.raises(ModelError, match="for a text encoder of width 512, but tiny-random has width 64"):
        load_context(tmp_path / "context.safetensors", tiny_model)


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("seed", range(3))
def test_it_learns_to_separate_colours(tiny_model: CLIP, seed: int) -> None:
    images, labels, classes = IMAGES[:14], LABELS[:14], ["house", "cat"]
    shots = draw_shots(images, labels, classes, 7, seed, print)
    features = encode_shots(tiny_model, shots, 1, seed, progress=False)[:, 0]
    targets = torch.tensor([shot.label for shot in shots])

    def loss_and_accuracy(context: Tensor | None) -> tuple[float, float]:
        text = ClassPrompts(tiny_model.text, classes, context=context).features()
        logits = tiny_model.logit_scale * features @ text.T
        return cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()

    recipe = CoOpRecipe(shots=7, views=3, batch_size=8, epochs=20, lr=0.02, seed=seed)
    before = loss_and_accuracy(None)
    after = loss_and_accuracy(train_context(tiny_model, images, labels, classes, recipe))
    assert before[1] == 0.5
    assert after[1] > 0.9
    assert after[0] < 0.5 * before[0]


@pytest.mark.parametrize(
    "recipe",
    [
        QUICK,
        replace(QUICK, init="words", seed=3, warmup_epochs=2, batch_size=5),
        replace(QUICK, shots=2, batch_size=32, views=1, template="an image, so nice, of {}."),
    ],
)
@pytest.mark.parametrize(("dtype", "lr", "tolerance"), [(torch.float32, 0.002, 1e-5), (torch.float64, 0.1, 1e-10)])
def test_it_is_what_a_plain_loop_computes(
    tiny_model: CLIP, recipe: CoOpRecipe, dtype: torch.dtype, lr: float, tolerance: float
) -> None:
    """The whole tower on full-length texts, PyTorch's own optimiser and schedule, and the same batches."""
    recipe, model = replace(recipe, lr=lr), deepcopy(tiny_model).to(dtype)
    shots = draw_shots(IMAGES, LABELS, CLASSES, recipe.shots, recipe.seed, print)
    views = encode_shots(model, shots, recipe.views, recipe.seed, progress=False).to(dtype)
    words = ClassPrompts(model.text, CLASSES, recipe.template).context
    drawn = torch.from_numpy(generator("context", recipe.seed).normal(0, 0.02, words.shape)).to(dtype)
    first = words if recipe.init == "words" else drawn
    context = first.clone().requires_grad_()
    optimizer = SGD([context], lr=recipe.lr, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, recipe.epochs)
    for epoch in range(recipe.epochs):
        cosine = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 1e-5 if epoch < recipe.warmup_epochs else cosine
        rng = generator("order", recipe.seed, epoch)
        order, chosen = rng.permutation(len(shots)), rng.integers(recipe.views, size=len(shots))
        full = len(shots) // recipe.batch_size * recipe.batch_size
        for first_row in range(0, full or len(shots), recipe.batch_size):
            rows = order[first_row : first_row + recipe.batch_size]
            features = torch.stack([views[i, chosen[first_row + k]] for k, i in enumerate(rows)])
            labels = torch.tensor([shots[i].label for i in rows])
            optimizer.zero_grad()
            cross_entropy(model.logit_scale * features @ naive(model.text, CLASSES, context).T, labels).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = cosine
        if epoch >= recipe.warmup_epochs:
            schedule.step()
    ours = learn(model, recipe=recipe)
    assert (ours - first).abs().max() > 10 * lr
    torch.testing.assert_close(ours, context.detach(), atol=tolerance, rtol=0)


def test_the_rates_are_those_of_coop() -> None:
    rates = [CoOpRecipe().rate(epoch) for epoch in range(50)]
    assert rates[:2] == [1e-5, 0.002]
    assert rates[26] == pytest.approx(0.001)
    assert rates[49] == pytest.approx(0.002 * 0.003943, rel=1e-3)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_the_seed_decides_everything(tiny_model: CLIP) -> None:
    first, again, other = (learn(tiny_model, recipe=replace(QUICK, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.01


def test_other_modes_of_autograd_are_no_obstacle(tiny_model: CLIP) -> None:
    expected = learn(tiny_model)
    with torch.inference_mode():
        assert torch.equal(learn(tiny_model), expected)
    with torch.no_grad():
        assert torch.equal(learn(tiny_model), expected)


def test_the_file_says_where_the_context_came_from(tiny_model: CLIP, tmp_path: Path) -> None:
    out = tmp_path / "context.safetensors"
    context = learn(tiny_model, out)
    assert torch.equal(load_context(out, tiny_model), context)
    tensors, metadata = read_context_file(out)
    assert sorted(tensors) == ["context", "losses", "start_token"]
    assert tensors["losses"].shape == (4,)
    assert tensors["losses"][-1] < tensors["losses"][0]
    assert metadata["model"] == "tiny-random"
    assert metadata["fingerprint"] == tiny_model.fingerprint
    assert {key: metadata[key] for key in ("classes", "images")} == {"classes": "3", "images": "18"}
    for key, value in asdict(QUICK).items():
        assert metadata[key] == str(value)
    assert template_of(out) == QUICK.template


class StoppedError(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("epochs_done", range(4))
def test_a_training_that_was_stopped_continues(
    tiny_model: CLIP, tmp_path: Path, epochs_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learn(tiny_model, tmp_path / "whole")
    out, steps = tmp_path / "context.safetensors", iter(range(100))
    real = train_module._loss

    def stop(*arguments: Any) -> tuple[float, Tensor]:
        if next(steps) == 2 * epochs_done + 1:  # the second of an epoch's two batches
            raise StoppedError
        return real(*arguments)

    monkeypatch.setattr(train_module, "_loss", stop)
    with pytest.raises(StoppedError):
        learn(tiny_model, out)
    monkeypatch.undo()
    with pytest.raises(ModelError, match=rf"not finished \(epoch {epochs_done} of 4\): rerun it"):
        load_context(out)
    logged: list[str] = []
    assert torch.equal(learn(tiny_model, out, log=logged.append), expected)
    assert logged == ([f"{out}: the training continues after epoch {epochs_done} of 4"] if epochs_done else [])
    (tensors, metadata), (expected_tensors, expected_metadata) = map(read_context_file, (out, tmp_path / "whole"))
    assert metadata == expected_metadata
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensors[key], expected_tensors[key]) for key in tensors)


PROGRAM = """
import os, signal, sys
from usetta.coop import CoOpRecipe, train, train_context
from usetta.data import load_dataset
from usetta.feature_cache import FeatureCache
from usetta.models import load_model

model, folder, out, batch = sys.argv[1:]
real, batches = train._loss, iter(range(int(batch)))

def killed(*arguments):
    if next(batches, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)

train._loss = killed
data = load_dataset(folder)
loaded = load_model(model, precision="fp32")
train_context(loaded, [item.path for item in data], data.labels, data.classes, {recipe!r}, out=out)
"""


def read_folder(folder: Path) -> tuple[list[Path], Sequence[int], Sequence[str]]:
    """Images, labels and class names."""
    data = load_dataset(folder)
    assert data.labels is not None
    return [item.path for item in data], data.labels, data.classes


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_loses_nothing(tiny_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "context.safetensors", replace(QUICK, epochs=12)
    batch = random.randrange(2, 24)
    command = [sys.executable, "-c", PROGRAM.format(recipe=recipe), tiny_checkpoint, folder, out, str(batch)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    model, logged = load_model(str(tiny_checkpoint), precision="fp32"), []
    context = train_context(model, *read_folder(folder), recipe, out=out, log=logged.append)
    assert logged == [f"{out}: the training continues after epoch {batch // 2} of 12"]
    assert torch.equal(context, train_context(model, *read_folder(folder), recipe))


def test_a_finished_training_computes_nothing(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, logged = tmp_path / "context.safetensors", []
    context, written = learn(tiny_model, out), out.stat().st_mtime_ns
    monkeypatch.setattr(train_module, "encode_shots", None)
    monkeypatch.setattr(train_module, "_loss", None)
    assert torch.equal(learn(tiny_model, out, log=logged.append), context)
    assert logged == [f"{out}: the training is already finished"]
    assert out.stat().st_mtime_ns == written


def test_views_that_were_encoded_are_not_encoded_again(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learn(tiny_model)
    for _ in range(2):
        with FeatureCache(tmp_path / "features") as cache:
            assert torch.equal(learn(tiny_model, cache=cache), expected)
        monkeypatch.setattr(tiny_model, "encode_images", None)  # the second time everything is in the cache


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recipe": replace(QUICK, lr=0.2)}, "lr 0.1 instead of 0.2"),
        ({"recipe": replace(QUICK, epochs=5, views=4)}, "epochs 4 instead of 5, views 3 instead of 4"),
        ({"recipe": replace(QUICK, template="a photo of a {}!")}, "template a photo of a {}. instead of"),
        ({"recipe": replace(QUICK, seed=1)}, "other images, seed 0 instead of 1"),
        ({"classes": ["house", "owl", "fox"]}, "other classes"),
        ({"images": [image(label, 9) for label in LABELS]}, "other images"),
        ({"labels": LABELS[::-1]}, "other images"),
        ({"model": disturbed(TINY_VIT)}, "another model"),
    ],
)
def test_the_file_of_another_training_is_left_alone(
    tiny_model: CLIP,
    tmp_path: Path,
    change: dict[str, Any],
    reason: str,
    finished: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "context.safetensors"
    settings = {"model": tiny_model, "images": IMAGES, "labels": LABELS, "classes": CLASSES, "recipe": QUICK}
    if finished:
        learn(tiny_model, out)
    else:
        monkeypatch.setattr(train_module, "_loss", None)
        with pytest.raises(TypeError):
            learn(tiny_model, out)
        monkeypatch.undo()
    written = out.read_bytes()
    with pytest.raises(ValueError, match=f"from a training with {reason}.*: choose another file, or delete this one"):
        train_context(**{**settings, **change}, out=out)
    assert out.read_bytes() == written


def test_other_files_are_never_overwritten(tiny_model: CLIP, tmp_path: Path) -> None:
    ours, weights, text = tmp_path / "context.safetensors", tmp_path / "weights.safetensors", tmp_path / "notes.txt"
    save_context(ours, some_context())
    save_file({"weight": torch.ones(3)}, weights)
    text.write_text("do not lose me")
    for path, reason in [
        (ours, "contains a context, but not the state of a training: choose another"),
        (weights, "contains no context"),
        (text, "damaged, or not a file with a learned context"),
        (tmp_path, "is not a file"),
    ]:
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(ModelError, match=reason):
            learn(tiny_model, path)
        assert not before or path.read_bytes() == before


def test_a_place_that_cannot_be_written_to_fails_before_the_work(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(train_module, "encode_shots", None)
    with pytest.raises(OSError, match="file"):
        learn(tiny_model, tmp_path / "file" / "context.safetensors")


def test_a_rate_too_high_is_reported(tiny_model: CLIP) -> None:
    with pytest.raises(ValueError, match=r"the loss became nan in epoch \d: lower the learning rate \(1e\+38\)"):
        learn(tiny_model, recipe=replace(QUICK, lr=1e38, epochs=9))


# ---------------------------------------------------------------------------------------------------------------- shots


def test_shots_are_drawn_from_each_class_by_seed() -> None:
    draws = [draw_shots(IMAGES, LABELS, CLASSES, 3, seed, print) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert [shot.label for shot in draws[0]] == [0] * 3 + [1] * 3 + [2] * 3
    assert len({shot.id for shot in draws[0]}) == 9
    everything = draw_shots(IMAGES, LABELS, CLASSES, 99, 0, print)
    assert {shot.id for shot in everything} > {shot.id for shot in draws[0]}
    assert len(everything) == 21


def test_a_bad_image_is_logged_and_replaced(folder: Path) -> None:
    images, labels, classes = read_folder(folder)
    chosen = [shot.image for shot in draw_shots(images, labels, classes, 6, 0, print) if shot.label == 1]
    assert isinstance(chosen[2], Path)
    chosen[2].write_bytes(b"")
    logged: list[str] = []
    shots = draw_shots(images, labels, classes, 6, 0, logged.append)
    assert logged == [f"left out: {chosen[2]}: file is empty"]
    assert len(shots) == 18
    assert chosen[2] not in [shot.image for shot in shots]


def test_a_class_without_an_image_is_named(folder: Path) -> None:
    images, labels, classes = read_folder(folder)
    for path in (folder / "owl").iterdir():
        path.write_bytes(b"no image")
    logged: list[str] = []
    with pytest.raises(ValueError, match="class 'owl' cannot be learned: none of its images can be read"):
        draw_shots(images, labels, classes, 6, 0, logged.append)
    assert len(logged) == 7
    with pytest.raises(ValueError, match="class 'wolf' cannot be learned: it has no images"):
        draw_shots(IMAGES, LABELS, [*CLASSES, "wolf"], 6, 0, print)


def test_labels_that_do_not_fit_are_named(tiny_model: CLIP) -> None:
    with pytest.raises(ValueError, match="there are 21 images and 20 labels"):
        train_context(tiny_model, IMAGES, LABELS[1:], CLASSES)
    with pytest.raises(ValueError, match="label 2 is out of range: there are 2 classes"):
        train_context(tiny_model, IMAGES, LABELS, CLASSES[:2])
    with pytest.raises(ValueError, match="label -1 is out of range"):
        train_context(tiny_model, IMAGES, [-1] * 21, CLASSES)


@pytest.mark.parametrize("template", ["{}", "{} on a photo", "a non{}"])
def test_a_template_without_a_context_is_refused(tiny_model: CLIP, template: str) -> None:
    with pytest.raises(ValueError, match="needs words before {}, which are then learned"):
        learn(tiny_model, recipe=replace(QUICK, template=template))


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        *[(name, 0, f"{name} must be at least 1, not 0") for name in ("shots", "epochs", "batch_size", "views")],
        *[(name, -1, f"{name} must not be negative") for name in ("seed", "momentum", "weight_decay", "warmup_lr")],
        ("lr", 0, "lr must be above 0, not 0"),
        ("lr", float("nan"), "lr must be above 0, not nan"),
        ("init", "zeros", "init must be 'random' or 'words', not 'zeros'"),
    ],
)
def test_wrong_settings_are_named(setting: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CoOpRecipe(**{setting: value})
