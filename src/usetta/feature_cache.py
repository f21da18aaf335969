"""Features of views on disk, so that a second run with other methods encodes nothing.

One SQLite database for any number of images, models and recipes of views. Features are kept in single precision, as
they were computed, so an answer does not depend on where its features came from. Half precision takes half the space;
who chooses it also rounds what is computed (`Pipeline` does), for the same reason, and records the choice.
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

from usetta.files import connect

CACHE_FILE = "features.sqlite"
_KINDS = {2: "<f2", 4: "<f4"}
"""How numbers of so many bytes are stored."""


class CacheError(ValueError):
    """A feature cache cannot be read or written; the message says why and what to do."""


def feature_key(model: str, views: str, image: str, digest: str) -> bytes:
    """The key of an image's features: fingerprint of the model, recipe of the views, and the image by id and content.

    The id decides the random draws, the digest of the content what they are applied to.
    """
    parts = "\0".join((model, views, image, digest))
    return hashlib.blake2b(parts.encode("utf-8", "surrogateescape"), digest_size=16).digest()


class FeatureCache:
    """Features by key. Threads and processes may share it. With `half`, what is added is kept in half precision."""

    def __init__(self, folder: Path, *, half: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.half = half
        self._path = folder / CACHE_FILE
        self._lock = threading.Lock()
        with self._clear_errors():
            self._db = connect(self._path, threads=True)
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS features (key BLOB UNIQUE, views INTEGER, bytes INTEGER, data BLOB)"
                )
            self._db.execute("SELECT key, views, bytes, data FROM features LIMIT 0")  # fails on any other database

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def get(self, key: bytes) -> Tensor | None:
        """Features (N, D) in single precision, or None. Those of the other precision are not taken."""
        with self._lock, self._clear_errors():
            row = self._db.execute(
                "SELECT views, bytes, data FROM features WHERE key = ?", (self._key(key),)
            ).fetchone()
            if row is None:
                return None
            views, size, data = row
            return torch.from_numpy(np.frombuffer(data, dtype=_KINDS[size]).reshape(views, -1).astype(np.float32))

    def put(self, features: Mapping[bytes, Tensor]) -> None:
        """Keep features (N, D) by key, all or none."""
        size = 2 if self.half else 4
        rows = [
            (self._key(key), len(tensor), size, tensor.cpu().numpy().astype(_KINDS[size]).tobytes())
            for key, tensor in features.items()
        ]
        with self._lock, self._clear_errors(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)

    def _key(self, key: bytes) -> bytes:
        # Rounded and exact features of the same views are two things, and a run uses one of them throughout.
        return key + b"h" if self.half else key

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise CacheError(
                f"{self._path} cannot be used as a feature cache ({error}). If it is damaged, delete it: its features "
                "will be computed again"
            ) from error
