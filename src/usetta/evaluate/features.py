"""Features of views on disk, so that a second run with other methods encodes nothing.

One SQLite database for any number of images, models and recipes of views. Features are kept as they
were computed, in single precision: a result does not depend on where its features came from.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from usetta.evaluate.store import StoreError, connect

FILE = "features.sqlite"


def feature_key(model: str, views: str, image: str, digest: str) -> bytes:
    """The key of an image's features: fingerprint of the model, recipe of the views, and the image by id and file.

    The id decides the random draws, the file's digest what they are applied to.
    """
    parts = "\0".join((model, views, image, digest))
    return hashlib.blake2b(parts.encode("utf-8", "surrogateescape"), digest_size=16).digest()


class FeatureCache:
    """Features by key. Threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._lock = threading.Lock()
        with self._clear_errors():
            self._db = connect(self._path, threads=True)
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._db.execute("CREATE TABLE IF NOT EXISTS features (key BLOB UNIQUE, views INTEGER, single BLOB)")
            self._db.execute(
                "SELECT key, views, single FROM features LIMIT 0"
            )  # else it is a database of something else

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def get(self, key: bytes) -> Tensor | None:
        """Features (N, D) if they are there."""
        with self._lock, self._clear_errors():
            found = self._db.execute("SELECT views, single FROM features WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            views, single = found
            return torch.from_numpy(np.frombuffer(single, dtype="<f4").reshape(views, -1).astype(np.float32))

    def put(self, features: Mapping[bytes, Tensor]) -> None:
        """Keep features (N, D) by key, all or none."""
        rows = [(key, len(each), each.numpy().astype("<f4").tobytes()) for key, each in features.items()]
        with self._lock, self._clear_errors(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise StoreError(
                f"{self._path} cannot be used as a cache of features ({error}). If it is damaged, delete it: what it "
                "held is computed again"
            ) from error
