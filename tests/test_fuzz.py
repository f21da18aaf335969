"""Damaged files of every kind: whatever is in them, the answer is their content or the error that names the file.

Each file begins as a valid one, of which hypothesis changes, cuts, inserts and removes parts. A few examples run with
the other tests; `make fuzz` tries many more (`USETTA_FUZZ` is how many for each kind).
"""

import io
import json
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import make_image
from models.tiny import TINY_VIT
from usetta.batch.sources import SourceError, images
from usetta.coop import load_context
from usetta.data import DataError
from usetta.data.own_images import read_list
from usetta.evaluate.store import FILE, Store, StoreError
from usetta.images import ImageError, open_image
from usetta.models import ModelError
from usetta.models.clip import random_model
from usetta.models.state_files import read_state
from usetta.rejection import Calibration

EXAMPLES = int(os.environ.get("USETTA_FUZZ", "20"))

Change = tuple[str, float, bytes]


def damaged(content: bytes, changes: list[Change]) -> bytes:
    for kind, place, new in changes:
        at = int(place * len(content))
        if kind == "write":
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        elif kind == "cut":
            content = content[:at]
        else:
            content = content[:at] + content[at + 8 * len(new) :]
    return content


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "insert", "cut", "remove"]),
        # Heads and tails, where formats keep what they are.
        st.one_of(st.floats(0, 1), st.floats(0, 0.02), st.floats(0.98, 1)),
        st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff"])),
    ),
    min_size=1,
    max_size=4,
)


def saved_image(kind: str) -> bytes:
    buffer = io.BytesIO()
    make_image(3, (40, 30)).save(buffer, kind)
    return buffer.getvalue()


def as_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i in range(2):
            entry = tarfile.TarInfo(f"a/{i}.png")
            entry.size = len(content := saved_image("PNG"))
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def as_parquet() -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table({"image": [saved_image("PNG")] * 3, "path": ["a", "b", "c"]}), buffer)
    return buffer.getvalue()


def as_checkpoint(suffix: str) -> bytes:
    state = {"a": torch.zeros(3, 4), "b.c": torch.ones(5), "n": torch.tensor(2)}
    buffer = io.BytesIO()
    if suffix == "pt":
        torch.save({"state_dict": state}, buffer)
        return buffer.getvalue()
    from safetensors.torch import save

    return save(state)


def as_context() -> bytes:
    buffer = io.BytesIO()
    torch.save({"state_dict": {"ctx": torch.zeros(4, 64)}, "epoch": 50}, buffer)
    return buffer.getvalue()


def as_store(tmp: Path) -> bytes:
    with Store(tmp / "seed") as store:
        store.fix("run", "model", {"name": "tiny"})
    import sqlite3

    with sqlite3.connect(tmp / "seed" / FILE) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    return (tmp / "seed" / FILE).read_bytes()


def read_images(file: Path) -> None:
    for image in images([str(file)]):
        with suppress(ImageError):
            open_image(image.read(), max_pixels=10_000)


def read_store(file: Path) -> None:
    with Store(file.parent) as store:
        list(store.rows())
        store.facts("run")


def read_context(file: Path) -> None:
    load_context(file, MODEL)


def as_manifest(suffix: str) -> bytes:
    rows = [{"path": name, "label": label} for name, label in (("a.png", 0), ("b.png", 1), ("ü.png", 0))]
    if suffix == "csv":
        return b"path,label\r\n" + "".join(f"{row['path']},{row['label']}\r\n" for row in rows).encode()
    if suffix == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    items = [[row["path"], row["label"], "cat"] for row in rows]
    return json.dumps({"items": items, "classes": ["cat", "dog"]}).encode()


def read_manifest(file: Path) -> None:
    for name in ("a.png", "b.png", "ü.png"):
        (file.parent / name).touch()
    read_list(file)


MODEL = random_model(TINY_VIT, name="tiny")
CALIBRATION = Calibration("tiny", "0" * 64, "se", 2.0, 0.5, 0.9, 0.8, 100)
Read = Callable[[Path], object]
KINDS: dict[str, tuple[Callable[[Path], bytes], Read, tuple[type[Exception], ...]]] = {
    **{
        f"image.{kind.lower()}": (
            lambda _tmp, kind=kind: saved_image(kind),
            lambda file: open_image(file, max_pixels=10_000),
            (ImageError,),
        )
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    },
    "images.tar": (lambda _tmp: as_tar(), read_images, (SourceError,)),
    "images.parquet": (lambda _tmp: as_parquet(), read_images, (SourceError,)),
    "images.txt": (lambda _tmp: b"a/b.png\nc.jpg\n" * 9, read_images, (SourceError,)),
    **{
        f"manifest.{kind}": (lambda _tmp, kind=kind: as_manifest(kind), read_manifest, (DataError,))
        for kind in ("csv", "jsonl", "json")
    },
    "calibration.json": (
        lambda _tmp: json.dumps({"usetta_calibration": 1, **asdict(CALIBRATION)}).encode(),
        Calibration.load,
        (ValueError,),
    ),
    "weights.safetensors": (lambda _tmp: as_checkpoint("safetensors"), read_state, (ModelError,)),
    "weights.pt": (lambda _tmp: as_checkpoint("pt"), read_state, (ModelError,)),
    "context.tar": (lambda _tmp: as_context(), read_context, (ModelError,)),
    FILE: (as_store, read_store, (StoreError,)),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_read_or_named(name: str, tmp_path: Path) -> None:
    make, read, expected = KINDS[name]
    content, file = make(tmp_path), tmp_path / name

    @settings(max_examples=EXAMPLES, deadline=5000, database=None, suppress_health_check=list(HealthCheck))
    @given(CHANGES)
    def attack(changes: list[Change]) -> None:
        for left in tmp_path.glob(f"{name}*"):
            left.unlink()
        file.write_bytes(damaged(content, changes))
        with suppress(*expected):
            read(file)

    attack()
