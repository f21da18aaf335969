"""A real Ray cluster of two nodes whose workers, node and driver are killed: the results are those of one process.

What is slow here is not Ray but the import of torch in every actor that starts, so the tests start few. The last test
kills the second node, and no test may need it afterwards.
"""

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from distributed import workers
from distributed.cluster import Cluster, running, wait_for
from distributed.workers import Numbers, SquareWorker
from evaluate.runs import CLASSES, VIEWS, assert_close, content, four_blocks, make_dataset
from test_paths import TEMPLATE, assert_rows_are_exact, expected_probabilities, make_images
from usetta import methods
from usetta.batch.runner import BatchSettings, classify
from usetta.cli import app
from usetta.data import Dataset, load_dataset
from usetta.distributed import RayEngine
from usetta.distributed.ray import ITEMS_PER_ACTOR
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import FILE, Store
from usetta.models import load_model
from usetta.models.checkpoints import save_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
ray = pytest.importorskip("ray", reason="Ray is not installed")

METHODS = ("clip", "se", "use")
SETTINGS = EvalSettings(views=6)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a worker of one CPU: so results agree to the bit, and threads do not wait for each other's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as started:
        started.grow()
        yield started


@pytest.fixture(scope="module")
def engine(cluster: Cluster) -> RayEngine:
    return RayEngine(cluster.address, workers=2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Twenty images, one of which is damaged."""
    images = make_dataset(tmp_path_factory.mktemp("images"), 20)
    images[11].path.write_bytes(b"no image")
    return images


def row_count(out: Path) -> int:
    if not (out / FILE).is_file():
        return 0
    with Store(out) as store:
        return sum(n for *_, n in store.groups())


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do something else in a thread, and raise its errors."""
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


def test_every_item_is_done_once_and_few_are_in_progress(engine: RayEngine, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    read: list[Numbers] = []
    done: Counter[Numbers] = Counter()

    def processes() -> set[str]:
        return set(trace.read_text().split()) if trace.exists() else set()

    def stream() -> Iterator[Numbers]:
        """At least a hundred items, and until both workers have done some."""
        while len(read) < 100 or (len(processes()) < 2 and len(read) < 10**4):
            if len(read) >= 100:
                time.sleep(0.01)  # the other worker starts when the machine has time for it
            read.append(Numbers((len(read), len(read) + 10**6)))
            yield read[-1]

    for item, squares in engine.run(partial(SquareWorker, trace=trace), stream()):
        assert squares == [number**2 for number in item.key]
        done[item] += 1
        assert len(read) <= done.total() + 2 * ITEMS_PER_ACTOR
    assert done == Counter(read)
    assert len(processes()) == 2
    one_worker = RayEngine(engine.address, workers=1)
    with pytest.raises(ValueError, match="^7 cannot be squared$"):
        list(one_worker.run(partial(SquareWorker, invalid=7), map(Numbers, [(1,), (7,), (9,)])))


def test_probabilities_are_those_of_the_classifier_and_an_image_that_kills_its_worker_is_reported(
    engine: RayEngine, tmp_path: Path
) -> None:
    """To the bit. Images come from files, which workers read, and from a tar, which the driver reads."""
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    processes = tmp_path / "processes"
    processes.mkdir()
    images = make_images(tmp_path / "images")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for path in images[:2]:
            tar.add(path, f"{path.name}.png")
    black = tmp_path / "black.png"
    Image.new("RGB", (50, 50)).save(black)
    settings = BatchSettings(CLASSES, methods.get("use"), (TEMPLATE,), views=VIEWS, top=len(CLASSES))
    sources = [*map(str, images[:2]), str(black), *map(str, images[2:]), str(tmp_path / "images.tar")]
    load = partial(workers.load, workers.DeadlyModel, processes)
    one = replace(engine, workers=1)
    done = classify(four_blocks(), settings, sources, tmp_path / "out", engine=one, load=load)
    assert (done.images, done.failed) == (len(images) + 3, 1)
    assert 1 + 2 <= len(list(processes.iterdir())) <= 1 + 3, "one worker, and those that replaced dead ones"
    expected = expected_probabilities(four_blocks(), images, ["use"])
    (failed,) = assert_rows_are_exact(tmp_path / "out", "use", expected, rows=len(images) + 3)
    assert (failed["source"], failed["label"]) == (str(black), None)
    assert failed["error"].startswith("killed its worker each of the 3 times it was tried (Actor")


@pytest.mark.parametrize("with_process", [True, False])
def test_a_worker_that_hangs_is_killed_and_replaced(
    engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_process: bool
) -> None:
    monkeypatch.setattr("usetta.distributed.ray.BEAT_SECONDS", 0.5)
    monkeypatch.setattr("usetta.distributed.ray.SILENCE_TIMEOUT", 5.0 if with_process else 1000.0)
    monkeypatch.setattr("usetta.distributed.ray.STALL_TIMEOUT", 1000.0 if with_process else 5.0)
    stopped = tmp_path / "stopped"
    items = [Numbers((n,)) for n in range(8)]
    done = list(replace(engine, workers=1).run(partial(workers.HangingWorker, stopped, with_process), items))
    assert sorted(done, key=lambda one: one[0].key) == [(item, [item.key[0] ** 2]) for item in items]
    wait_for(lambda: not Path(f"/proc/{stopped.read_text()}").exists())


def test_a_driver_that_was_killed_continues(engine: RayEngine, dataset: Dataset, tmp_path: Path) -> None:
    """By the command line, as people do it."""
    save_model(four_blocks(), tmp_path)
    listed = tmp_path / "things.csv"
    lines = [f"{image.path},{dataset.classes[image.label or 0]}" for image in dataset]
    listed.write_text("\n".join(["path,label", *lines]) + "\n")
    out = tmp_path / "run"
    command = ["eval", "--datasets", str(listed), "--model", str(tmp_path)]
    command += ["--methods", ",".join(METHODS), "--views", "6", "--seeds", "0,1", "--batch-size", "1"]
    command += ["--engine", "ray", "--address", engine.address, "--workers", "1", "--out", str(out)]
    process = [sys.executable, "-m", "usetta", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(process, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as first:
        wait_for(lambda: row_count(out) or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
        _, messages = first.communicate()
    assert first.returncode == -signal.SIGKILL, messages
    assert 0 < row_count(out) < 114
    # By the local engine, which any run may continue with; in this process, which has imported torch already.
    second = CliRunner().invoke(app, [*command[:-8], "--out", str(out)])
    assert second.exit_code == 1, second.output  # because of the damaged image
    assert second.stdout.startswith("Accuracy, %"), "nothing but the table"
    assert row_count(out) == 114
    local = load_model(str(tmp_path)), [load_dataset(listed)]
    evaluate(*local, METHODS, tmp_path / "local", SETTINGS, seeds=(0, 1), batch_size=1)
    assert_close(content(out), content(tmp_path / "local"))
    with Store(out) as store:
        images = [invocation["images"] for invocation in store.facts("invocation").values()]
    assert len(images) == 2
    assert sum(images) <= 42, "only what was missing was done again, and the damaged image"


def test_a_worker_and_a_node_are_killed_and_the_results_are_those_of_the_local_engine(
    cluster: Cluster, engine: RayEngine, dataset: Dataset, tmp_path: Path
) -> None:
    processes, out = tmp_path / "processes", tmp_path / "run"
    processes.mkdir()
    messages: list[str] = []
    options: dict[str, Any] = {"settings": SETTINGS, "seeds": (0, 1), "batch_size": 3}

    def kill() -> None:
        try:
            wait_for(lambda: row_count(out) >= 12)
            os.kill(int(next(processes.iterdir()).name), signal.SIGKILL)
            wait_for(lambda: len(list(processes.iterdir())) == 3)  # the dead worker was replaced
            before = row_count(out)
            wait_for(lambda: row_count(out) > before)
            cluster.kill_node()
            assert row_count(out) < 114, "too late, the run is over"
        finally:
            (processes / "hurry").touch()

    with meanwhile(kill):
        done = evaluate(
            four_blocks(),
            [dataset],
            METHODS,
            out,
            engine=engine,
            load=partial(workers.load, workers.SlowModel, processes),
            log=messages.append,
            **options,
        )
    evaluate(four_blocks(), [dataset], METHODS, tmp_path / "local", **options)
    assert (done.images, done.rows, done.failed) == (40, 114, 1), "nothing is done twice"
    assert_close(content(out), content(tmp_path / "local"))
    damaged = f"things: {dataset.ids[11]}: not an image, or in an unsupported format"
    assert Counter(message.startswith(damaged) for message in messages) == Counter({True: 2, False: 2})
    again = evaluate(four_blocks(), [dataset], METHODS, out, **options)
    assert (again.images, again.rows) == (2, 0), "only the damaged image is tried again"
