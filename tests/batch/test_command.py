"""`usetta classify --out` as a user meets it, and what the options of engines refuse."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from usetta import Classifier
from usetta.batch.parts import Parts, PredictionRow
from usetta.cli import app
from usetta.coop import save_context
from usetta.distributed import RayEngine
from usetta.models.clip import CLIP

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def options(tiny_checkpoint: Path) -> list[object]:
    return ["--classes", "tabby cat,red fox", "--model", tiny_checkpoint, "--views", "4"]


@pytest.mark.parametrize("name", ["predictions", "predictions.parquet"])
def test_predictions_go_to_a_directory_or_a_file_that_the_same_command_continues(
    options: list[object], images: list[Path], tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    images[1].write_bytes(b"no image")
    first = usetta("classify", images[0].parent, *options, "--out", out)
    assert first.exit_code == 1
    assert first.stdout == ""
    assert f"{images[0].parent}: image-1.png: not an image, or in an unsupported format" in first.stderr
    assert "5 images in" in first.stderr
    assert out.is_file() == (name == "predictions.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", name]
    assert "1 of 5 images could not be read" in first.stderr
    images[1].write_bytes(images[0].read_bytes())
    again = usetta("classify", images[0].parent, *options, "--out", out)
    assert again.exit_code == 0, again.output
    assert "1 image in" in again.stderr
    assert "4 were already there" in again.stderr
    rows = {row["key"]: row for row in parquet.read_table(out).to_pylist()}
    assert sorted(rows) == [f"image-{i}.png" for i in range(5)]
    console = usetta("classify", *images, *options)
    for line, image in zip(console.stdout.splitlines(), images, strict=True):
        row = rows[image.name]
        assert line.startswith(f"{image}  {row['label']}  {row['confidence']:.1%}"), "as without --out"
    other = usetta("classify", images[0].parent, *options, "--seed", 1, "--out", out)
    assert other.exit_code == 2
    assert "were made with other settings (seed was 0 and is now 1): choose another --out" in other.stderr
    assert len(parquet.read_table(out)) == 5, "what was there is still there"


def test_the_options_of_an_engine_reach_it_and_workers_load_the_same_model(
    options: list[object], images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is given by a relative path, and workers are somewhere else."""
    seen: list[Any] = []

    def run(engine: RayEngine, make_worker: Any, works: Any) -> Any:
        monkeypatch.chdir("/")
        worker = make_worker()
        seen.append(engine)
        for work in works:
            yield work, next(worker.run([work]))

    monkeypatch.setattr(RayEngine, "run", run)
    monkeypatch.chdir(Path(str(options[3])).parent)
    options[3] = Path(str(options[3])).name
    cluster = ["--engine", "ray", "--address", "10.0.0.1:6379", "--workers", 3, "--cpus-per-worker", 2]
    result = usetta("classify", images[0].parent, *options, "--out", tmp_path / "out", *cluster)
    assert result.exit_code == 0, result.output
    assert seen == [RayEngine("10.0.0.1:6379", 3, 2.0, 0.0)]
    assert len(parquet.read_table(tmp_path / "out")) == 5
    monkeypatch.chdir(Path(str(options[3])).parent)


def test_an_evaluation_uses_the_engine_as_well(
    tiny_checkpoint: Path, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for image in images:
        home = tmp_path / "zoo" / ("cat" if image.stem[-1] in "02" else "red fox")
        home.mkdir(parents=True, exist_ok=True)
        image.rename(home / image.name)
    seen: list[Any] = []

    def run(engine: RayEngine, make_worker: Any, works: Any) -> Any:
        seen.append(engine)
        worker = make_worker()
        for work in works:
            for part in reversed(work.parts()):
                yield part, next(worker.run([part]))

    monkeypatch.setattr(RayEngine, "run", run)
    command = ["eval", "--data", tmp_path / "zoo", "--model", tiny_checkpoint, "--views", 4, "--methods", "clip,use"]
    remote = usetta(*command, "--out", tmp_path / "remote", "--engine", "ray", "--gpus-per-worker", 0)
    local = usetta(*command, "--out", tmp_path / "local")
    assert (remote.exit_code, local.exit_code) == (0, 0), remote.output
    assert remote.stdout == local.stdout
    assert "zoo, seed 0: clip" in remote.stderr
    assert seen == [RayEngine("auto", None, 1.0, 0.0)]


def test_a_run_that_is_stopped_says_how_to_resume(
    options: list[object], images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add, added = tmp_path / "out", Parts.add, list[PredictionRow]()

    def stop(parts: Parts, row: PredictionRow) -> None:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(row)
        add(parts, row)

    monkeypatch.setattr(Parts, "add", stop)
    stopped = usetta("classify", images[0].parent, *options, "--out", out)
    assert stopped.exit_code == 130
    assert f"usetta: stopped; what was computed is in {out}; rerun the same command to resume" in (
        " ".join(stopped.stderr.split("\n"))
    )
    monkeypatch.undo()
    rest = usetta("classify", images[0].parent, *options, "--out", out)
    assert rest.exit_code == 0, rest.output
    assert "3 images in" in rest.stderr
    assert "2 were already there" in rest.stderr
    assert len(parquet.read_table(out)) == 5


def test_sources_without_images_are_an_error_with_out_as_well(options: list[object], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "drawing.svg").touch()
    result = usetta("classify", tmp_path / "empty", *options, "--out", tmp_path / "out")
    assert result.exit_code == 2
    message = f"usetta: no images in {tmp_path / 'empty'}; 1 file ignored: 1 .svg"
    assert message in " ".join(result.stderr.split("\n"))


def test_a_learned_context_is_used_with_out_as_well(
    options: list[object], images: list[Path], tmp_path: Path, tiny_model: CLIP
) -> None:
    context = torch.randn(4, tiny_model.text.width, generator=torch.Generator().manual_seed(0))
    save_context(tmp_path / "context.safetensors", context)
    done = usetta(
        "classify", images[0], *options, "--context", tmp_path / "context.safetensors", "--out", tmp_path / "out"
    )
    assert done.exit_code == 0, done.output
    (row,) = parquet.read_table(tmp_path / "out").to_pylist()
    plain = Classifier(["tabby cat", "red fox"], tiny_model, views=4)(images[0])
    tuned = Classifier(["tabby cat", "red fox"], tiny_model, views=4, context=context)(images[0])
    assert row["confidence"] == pytest.approx(tuned.confidence, abs=1e-5)
    assert row["confidence"] != pytest.approx(plain.confidence, abs=1e-5)


@pytest.mark.parametrize("limit", [{"_AHEAD": 2}, {"_AHEAD_BYTES": 1}])
def test_how_many_images_are_listed_first_changes_no_answer(
    options: list[object], images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    tar = tmp_path / "images.tar"
    with tarfile.open(tar, "w") as archive:
        for image in images:
            archive.add(image, image.name)
    whole = usetta("classify", tar, *options, "--csv")
    ((name, value),) = limit.items()
    monkeypatch.setattr(f"usetta.cli.classify.{name}", value)
    assert usetta("classify", tar, *options, "--csv").stdout == whole.stdout
    assert whole.stdout.count("\n") == 1 + 5
