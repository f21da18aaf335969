"""Work on a real Ray cluster of two nodes, whose workers and nodes are killed: the end is that of the local engine."""

import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import make_image
from distributed import hands
from distributed.cluster import Cluster, running
from distributed.workers import Numbers, Squares
from evaluate.runs import Content, assert_close, content, four_blocks, make_dataset
from usetta import methods
from usetta.batch import run as bulk
from usetta.data import Dataset, load_dataset
from usetta.distributed import Failed, RayEngine
from usetta.distributed.ray import AHEAD
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import FILE, Store
from usetta.models import load_model
from usetta.models.checkpoints import save_model

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is not installed")

METHODS = ("clip", "se", "use")
SETTING = EvalSettings(views=6)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as found:
        yield found


@pytest.fixture
def engine(cluster: Cluster) -> RayEngine:
    cluster.grow()
    return RayEngine(cluster.address, workers=2)


def rows(out: Path) -> int:
    if not (out / FILE).is_file():
        return 0
    with Store(out) as store:
        return sum(n for *_, n in store.groups())


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Something else that goes on, and whose errors are told."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors


def test_every_piece_is_done_once_and_few_are_under_way(engine: RayEngine, tmp_path: Path) -> None:
    taken: list[Numbers] = []
    given: Counter[Numbers] = Counter()

    def workers() -> set[str]:
        lines = trace.read_text().splitlines() if trace.exists() else []
        return {line.split()[0] for line in lines}

    def stream(end: float = 60) -> Iterator[Numbers]:
        """At least three hundred, and until both workers have done some."""
        end += time.monotonic()
        while len(taken) < 300 or (len(workers()) < 2 and time.monotonic() < end):
            taken.append(Numbers((len(taken), len(taken) + 10**6)))
            yield taken[-1]

    trace = tmp_path / "trace"
    for work, found in engine.run(partial(Squares, trace=trace), stream()):
        assert found == [number**2 for number in work.key]
        given[work] += 1
        assert len(taken) <= given.total() + 2 * AHEAD
    assert given == Counter(taken)
    assert len(given) >= 300
    assert len(workers()) == 2
    with pytest.raises(ValueError, match="^7 cannot be squared$"):
        list(engine.run(partial(Squares, wrong=7), map(Numbers, [(1,), (7,), (9,)])))


def test_what_ends_its_worker_is_found_in_three_tries_and_the_rest_is_done(engine: RayEngine, tmp_path: Path) -> None:
    works = [Numbers(tuple(range(n, n + 4))) for n in range(0, 40, 4)]
    trace = tmp_path / "trace"
    results = list(engine.run(partial(Squares, deadly=14, trace=trace), works))
    done = Counter(number for work, _ in results for number in work.key)
    assert done == Counter(range(40))
    assert [(work.key, found.reason) for work, found in results if isinstance(found, Failed)] == [
        ((14,), "ended its worker each of 3 times that it was tried (ActorDiedError)")
    ]
    for work, found in results:
        assert isinstance(found, Failed) or found == [number**2 for number in work.key]
    tried = [line.split() for line in trace.read_text().splitlines() if "14" in line.split()[1:]]
    assert [numbers for _, *numbers in tried] == [["12", "13", "14", "15"], ["14"], ["14"]]
    assert len({worker for worker, *_ in tried}) == 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Thirty images, one of which is damaged."""
    found = make_dataset(tmp_path_factory.mktemp("images"), 30)
    found[11].path.write_bytes(b"no image")
    return found


@pytest.fixture(scope="module")
def expected(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Content:
    """What the local engine says."""
    out = tmp_path_factory.mktemp("local")
    done = evaluate(four_blocks(), [dataset], METHODS, out, SETTING, seeds=(0, 1), batch_size=3)
    assert (done.images, done.rows, done.bad) == (60, 29 * 2 * 3, 1)
    return content(out)


def test_a_worker_and_a_node_are_killed_and_the_table_is_that_of_the_local_engine(
    cluster: Cluster, engine: RayEngine, dataset: Dataset, expected: Content, tmp_path: Path
) -> None:
    registry, out = tmp_path / "registry", tmp_path / "run"
    registry.mkdir()
    said: list[str] = []

    def kill() -> None:
        try:
            wait_for(lambda: rows(out) >= 12)
            os.kill(int(next(registry.iterdir()).name), signal.SIGKILL)
            wait_for(lambda: len(list(registry.iterdir())) == 3)  # somebody took the place of the dead
            before = rows(out)
            wait_for(lambda: rows(out) > before)
            cluster.kill_node()
            assert rows(out) < 174, "the middle is over"
        finally:
            (registry / "hurry").touch()

    with meanwhile(kill):
        done = evaluate(
            four_blocks(),
            [dataset],
            METHODS,
            out,
            SETTING,
            seeds=(0, 1),
            batch_size=3,
            engine=engine,
            load=partial(hands.load, hands.Slow, registry),
            say=said.append,
        )
    assert done.rows == len(expected.rows) == 174, "nothing is done twice"
    assert (done.images, done.bad) == (60, 1)
    assert_close(content(out), expected)
    place = f"things: {dataset.ids[11]}: not an image in a format"
    assert Counter(line.startswith(place) for line in said) == Counter({True: 2, False: 2})
    again = evaluate(four_blocks(), [dataset], METHODS, out, SETTING, seeds=(0, 1), batch_size=3)
    assert (again.images, again.rows) == (2, 0), "the damaged image alone is tried again"


def test_a_image_that_ends_its_worker_is_reported_and_the_run_goes_on(engine: RayEngine, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 8)
    poison = dataset[2]
    Image.new("RGB", (50, 50)).save(poison.path)
    registry, out, said = tmp_path / "registry", tmp_path / "run", list[str]()
    registry.mkdir()

    load = partial(hands.load, hands.Deadly, registry)
    done = evaluate(
        four_blocks(), [dataset], METHODS, out, SETTING, batch_size=4, engine=engine, load=load, say=said.append
    )
    reason = "ended its worker each of 3 times that it was tried (ActorDiedError)"
    assert content(out).bad == [("things", poison.id, reason)]
    assert said.count(f"things: {poison.id}: {reason}") == 1
    assert (done.images, done.rows, done.bad) == (8, 7 * 3, 1)
    assert 2 + 2 <= len(list(registry.iterdir())) <= 2 + 3
    evaluate(four_blocks(), [dataset], METHODS, tmp_path / "local", SETTING, batch_size=4)
    local = [row for row in content(tmp_path / "local").rows if row.image != poison.id]
    assert [(row.image, row.method, row.prediction) for row in content(out).rows] == [
        (row.image, row.method, row.prediction) for row in local
    ]
    repaired = evaluate(four_blocks(), [dataset], METHODS, out, SETTING, batch_size=4)  # by a model that bears it
    assert (repaired.images, repaired.rows, repaired.bad) == (1, 3, 0)
    assert_close(content(out), content(tmp_path / "local"))


def test_a_driver_that_was_killed_continues(engine: RayEngine, dataset: Dataset, tmp_path: Path) -> None:
    """By the command line, as people do it."""
    save_model(four_blocks(), tmp_path)
    listed = tmp_path / "things.csv"
    lines = [f"{each.path},{dataset.classes[each.label or 0]}" for each in dataset]
    listed.write_text("\n".join(["path,label", *lines]) + "\n")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "usetta", "eval", "--datasets", str(listed), "--model", str(tmp_path)]
    command += ["--methods", ",".join(METHODS), "--views", "6", "--seeds", "0,1", "--batch-size", "1"]
    command += ["--engine", "ray", "--address", engine.address, "--workers", "2", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        wait_for(lambda: rows(out) or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
        _, told = first.communicate()
    assert first.returncode == -signal.SIGKILL, told
    left = rows(out)
    assert 0 < left < 174
    second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert second.returncode == 1, second.stderr  # of the damaged image
    assert second.stdout.startswith("Accuracy, %"), "nothing but the table"
    assert rows(out) == 174
    local = load_model(str(tmp_path), precision="fp32"), [load_dataset(listed)]
    evaluate(*local, METHODS, tmp_path / "here", SETTING, seeds=(0, 1), batch_size=1)
    assert_close(content(out), content(tmp_path / "here"))
    with Store(out) as store:
        told_images = [each["images"] for each in store.facts("invocation").values()]
    assert len(told_images) == 2
    assert sum(told_images) <= 62, "only what was missing was done again, and the damaged image"


def test_predictions_of_the_cluster_are_those_of_this_process(engine: RayEngine, tmp_path: Path) -> None:
    """From a folder, which workers read, and from a tar, which the driver does; one image ends its worker."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    registry, zoo = tmp_path / "registry", tmp_path / "zoo"
    registry.mkdir()
    zoo.mkdir()
    for seed in range(12):
        make_image(seed, (40 + seed, 44)).save(zoo / f"{seed:02}.png")
    Image.new("RGB", (50, 50)).save(zoo / "black.png")
    with tarfile.open(tmp_path / "zoo.tar", "w") as tar:
        for seed in range(4, 8):
            tar.add(zoo / f"{seed:02}.png", f"{seed}.png")
    setting = bulk.EvalSettings(("cat", "red fox", "lemon"), methods.get("use"), ("a photo of a {}.",), views=6)
    sources = [str(zoo), str(tmp_path / "zoo.tar")]

    def rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
        found = parquet.read_table(tmp_path / name).to_pylist()
        assert len(found) == 17, "nothing lost, nothing twice"
        return {(row["source"], row["key"]): row for row in found}

    bulk.classify(four_blocks(), setting, sources, tmp_path / "here")
    load = partial(hands.load, hands.Deadly, registry)
    done = bulk.classify(four_blocks(), setting, sources, tmp_path / "there", engine=engine, load=load)
    assert (done.images, done.bad) == (17, 1)
    here, there = rows("here"), rows("there")
    poison = there.pop((str(zoo), "black.png"))
    assert (poison["label"], poison["error"]) == (
        None,
        "ended its worker each of 3 times that it was tried (ActorDiedError)",
    )
    for place, row in there.items():
        expected = here[place]
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        probabilities = row.pop("top_probabilities"), expected.pop("top_probabilities")
        assert probabilities[0] == pytest.approx(probabilities[1], abs=1e-4)
        assert numbers == pytest.approx({name: expected[name] for name in numbers}, abs=1e-4)
        assert {**row, **numbers} == {**expected, **numbers}
