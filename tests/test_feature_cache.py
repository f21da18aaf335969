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

from evaluate.runs import VIEWS, content, four_blocks, make_dataset
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import FILE as RESULTS
from usetta.feature_cache import CACHE_FILE, CacheError, FeatureCache, feature_key
from usetta.models.clip import CLIP

SETTINGS = EvalSettings(views=VIEWS)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture
def things(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "things")


def features(seed: int, views: int = 5, dim: int = 7) -> torch.Tensor:
    return torch.randn(views, dim, generator=torch.Generator().manual_seed(seed))


def test_features_come_back_to_the_last_bit(tmp_path: Path) -> None:
    odd = torch.tensor([[0.0, -0.0, 1e-45, 3.4e38]])
    with FeatureCache(tmp_path / "a" / "b") as cache:
        assert cache.get(b"one") is None
        cache.put({b"one": features(1), b"two": features(2, views=1), b"odd": odd})
        cache.put({})
    with FeatureCache(tmp_path / "a" / "b") as cache:
        for key, expected in ((b"one", features(1)), (b"two", features(2, views=1)), (b"odd", odd)):
            kept = cache.get(key)
            assert kept is not None
            assert kept.dtype == torch.float32
            assert torch.equal(kept.view(torch.int32), expected.view(torch.int32))
        cache.put({b"one": features(3)})
        assert torch.equal(cache.get(b"one"), features(3))  # type: ignore[arg-type]


def test_rounded_and_exact_features_are_kept_apart(tmp_path: Path) -> None:
    with FeatureCache(tmp_path) as exact, FeatureCache(tmp_path, half=True) as half:
        half.put({b"one": features(1)})
        assert exact.get(b"one") is None
        exact.put({b"one": features(1)})
        assert torch.equal(exact.get(b"one"), features(1))  # type: ignore[arg-type]
        assert torch.equal(half.get(b"one"), features(1).half().float())  # type: ignore[arg-type]


def test_rounded_features_give_the_same_rows_from_the_cache_and_the_run_records_them(
    tmp_path: Path, model: CLIP, things: Dataset
) -> None:
    settings, cache = EvalSettings(views=VIEWS, half_features=True), tmp_path / "cache"
    for out, encoded in (("first", 5), ("again", 0)):
        assert evaluate(model, [things], ["se", "tpt"], tmp_path / out, settings, cache=cache).encoded == encoded
    evaluate(model, [things], ["se", "tpt"], tmp_path / "exact", SETTINGS, cache=cache)
    first, exact = content(tmp_path / "first"), content(tmp_path / "exact")
    assert first == content(tmp_path / "again")
    assert first.facts["run"]["features"] == {"precision": "fp16"}
    assert first.rows != exact.rows


def test_keys_differ_with_any_part_and_where_one_part_ends() -> None:
    parts = ("model", "views", "a/b.jpg", "digest")
    changed = [tuple(part + "x" if i == j else part for j, part in enumerate(parts)) for i in range(4)]
    moved = [("model", "view", "sa/b.jpg", "digest"), ("views", "model", "a/b.jpg", "digest")]
    undecodable = [("model", "views", "a/\udcff.jpg", "digest"), ("model", "views", "a/ÿ.jpg", "digest")]
    keys = {feature_key(*named) for named in (parts, *changed, *moved, *undecodable)}
    assert len(keys) == 9
    assert feature_key(*parts) in keys


def test_threads_and_other_connections_share_a_cache(tmp_path: Path) -> None:
    with FeatureCache(tmp_path) as cache, FeatureCache(tmp_path) as other, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: cache.put({bytes([i]): features(i)}), range(40)))
        for i, kept in enumerate(pool.map(lambda i: other.get(bytes([i])), range(40))):
            assert kept is not None
            assert torch.equal(kept, features(i))


def test_a_killed_process_leaves_whole_batches(tmp_path: Path) -> None:
    script = (
        "import os, signal, torch; from pathlib import Path; from usetta.feature_cache import FeatureCache\n"
        f"cache = FeatureCache(Path({str(tmp_path)!r}))\n"
        "for n in range(4): cache.put({bytes([n, i]): torch.ones(1, 2) for i in range(5)})\n"
        "cache._db.execute('INSERT INTO features VALUES (?, 1, 4, ?)', (b'half a batch', b'1234'))\n"
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
        with pytest.raises(CacheError, match=f"{CACHE_FILE} cannot be used as a feature cache .*{message}.*delete it"):
            evaluate(model, [things], ["se"], tmp_path / "run", SETTINGS, cache=tmp_path)
        assert (tmp_path / CACHE_FILE).read_bytes() == before
        assert not (tmp_path / "run").exists()

    (tmp_path / CACHE_FILE).write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    refused("not a database")
    (tmp_path / CACHE_FILE).unlink()
    evaluate(model, [things], ["clip"], tmp_path / "foreign", SETTINGS)
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
    evaluate(model, [things], ["se"], tmp_path / "first", SETTINGS, cache=cache)
    file = cache / CACHE_FILE
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)  # all pages but the first
    file.write_bytes(content)
    with pytest.raises(CacheError, match="cannot be used as a feature cache .*malformed.* delete it"):
        evaluate(model, [things], ["se"], out, SETTINGS, cache=cache)
    file.unlink()
    assert evaluate(model, [things], ["se"], out, SETTINGS, cache=cache).encoded == 5


def test_an_entry_that_was_cut_off_is_damage_too(tmp_path: Path) -> None:
    with FeatureCache(tmp_path) as cache:
        cache.put({b"one": features(1)})
        with sqlite3.connect(tmp_path / CACHE_FILE) as db:
            db.execute("UPDATE features SET data = substr(data, 1, 33)")
        with pytest.raises(CacheError, match="cannot be used as a feature cache"):
            cache.get(b"one")
