"""The cache of features: what comes out is what went in, and what is no cache is named."""

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from evaluate.runs import VIEWS
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import CACHE_FILE as RESULTS
from usetta.feature_cache import CACHE_FILE, CacheError, FeatureCache, feature_key
from usetta.models.clip import CLIP

SETTING = EvalSettings(views=VIEWS)


def features(seed: int, views: int = 5, dim: int = 7) -> torch.Tensor:
    return torch.randn(views, dim, generator=torch.Generator().manual_seed(seed))


def test_features_come_back_to_the_last_bit(tmp_path: Path) -> None:
    odd = torch.tensor([[0.0, -0.0, 6e-8, 65504.0]], dtype=torch.float16)
    with FeatureCache(tmp_path / "a" / "b") as cache:
        assert cache.get(b"one") is None
        cache.put({b"one": features(1), b"two": features(2, views=1), b"odd": odd})
        cache.put({})
    with FeatureCache(tmp_path / "a" / "b") as cache:
        for key, expected in ((b"one", features(1)), (b"two", features(2, views=1)), (b"odd", odd)):
            found = cache.get(key)
            assert found is not None
            assert found.dtype == torch.float16
            assert found.shape == expected.shape
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        cache.put({b"one": features(3)})
        assert torch.equal(cache.get(b"one"), features(3))  # type: ignore[arg-type]


def test_keys_differ_with_any_part_and_where_one_part_ends() -> None:
    parts = ("model", "views", "a/b.jpg", "digest")
    changed = [tuple(part + "x" if i == j else part for j, part in enumerate(parts)) for i in range(4)]
    moved = [("model", "view", "sa/b.jpg", "digest"), ("views", "model", "a/b.jpg", "digest")]
    undecodable = [("model", "views", "a/\udcff.jpg", "digest"), ("model", "views", "a/ÿ.jpg", "digest")]
    keys = {feature_key(*each) for each in (parts, *changed, *moved, *undecodable)}
    assert len(keys) == 9
    assert feature_key(*parts) in keys


def test_threads_and_other_connections_share_a_cache(tmp_path: Path) -> None:
    with FeatureCache(tmp_path) as cache, FeatureCache(tmp_path) as other, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: cache.put({bytes([i]): features(i)}), range(40)))
        assert all(
            torch.equal(found, features(i))
            for i, found in enumerate(pool.map(lambda i: other.get(bytes([i])), range(40)))
            if found is not None
        )
        assert None not in [other.get(bytes([i])) for i in range(40)]


def test_a_killed_process_leaves_whole_batches(tmp_path: Path) -> None:
    script = (
        "import os, signal, torch; from pathlib import Path; from usetta.feature_cache import FeatureCache\n"
        f"cache = FeatureCache(Path({str(tmp_path)!r}))\n"
        "for n in range(4): cache.put({bytes([n, i]): torch.ones(1, 2) for i in range(5)})\n"
        "cache._db.execute('INSERT INTO features VALUES (?, 1, ?)', (b'half a batch', b'1234'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    with FeatureCache(tmp_path) as cache:
        assert all(cache.get(bytes([n, i])) is not None for n in range(4) for i in range(5))
        assert cache.get(b"half a batch") is None


def test_what_is_not_a_cache_is_named(tmp_path: Path, model: CLIP, things: Dataset) -> None:
    def refused(message: str) -> None:
        before = (tmp_path / CACHE_FILE).read_bytes()
        with pytest.raises(
            CacheError, match=f"{CACHE_FILE} cannot be used as a cache of features .*{message}.*delete it"
        ):
            evaluate(model, [things], ["se"], tmp_path / "run", SETTING, cache=tmp_path)
        assert (tmp_path / CACHE_FILE).read_bytes() == before
        assert not (tmp_path / "run").exists()

    (tmp_path / CACHE_FILE).write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    refused("not a database")
    (tmp_path / CACHE_FILE).unlink()
    evaluate(model, [things], ["clip"], tmp_path / "foreign", SETTING)
    (tmp_path / CACHE_FILE).write_bytes((tmp_path / "foreign" / RESULTS).read_bytes())
    refused("no such table: features")
    (tmp_path / CACHE_FILE).unlink()
    with sqlite3.connect(tmp_path / CACHE_FILE) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE features (name TEXT)")
    db.close()
    refused("no such column: key")
    (tmp_path / CACHE_FILE).unlink()
    (tmp_path / CACHE_FILE).mkdir()
    with pytest.raises(CacheError, match="unable to open"):
        FeatureCache(tmp_path)


def test_a_cache_that_was_damaged_stops_the_run_with_a_clear_error(
    tmp_path: Path, model: CLIP, things: Dataset
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "run"
    evaluate(model, [things], ["se"], tmp_path / "first", SETTING, cache=cache)
    file = cache / CACHE_FILE
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)  # all pages but the first
    file.write_bytes(content)
    with pytest.raises(CacheError, match="cannot be used as a cache of features .*malformed.* delete it"):
        evaluate(model, [things], ["se"], out, SETTING, cache=cache)
    file.unlink()
    assert evaluate(model, [things], ["se"], out, SETTING, cache=cache).encoded == 5


def test_an_entry_that_was_cut_off_is_damage_too(tmp_path: Path) -> None:
    with FeatureCache(tmp_path) as cache:
        cache.put({b"one": features(1)})
        cache._db.execute("UPDATE features SET single = substr(single, 1, 33)")
        with pytest.raises(CacheError, match="cannot be used as a cache of features"):
            cache.get(b"one")
