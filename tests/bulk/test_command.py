"""`usetta classify --out` as a user meets it, and what the options of engines refuse."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from usetta.cli import app
from usetta.engines import RayCluster

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def options(tiny_checkpoint: Path) -> list[object]:
    return ["--classes", "tabby cat,red fox", "--model", tiny_checkpoint, "--views", "4"]


def test_predictions_go_to_a_directory_that_the_same_command_continues(
    options: list[object], pictures: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "predictions.parquet"
    pictures[1].write_bytes(b"no picture")
    first = usetta("classify", pictures[0].parent, *options, "--out", out)
    assert first.exit_code == 1
    assert first.stdout == ""
    assert f"{pictures[0].parent}: picture-1.png: not a picture in a format" in first.stderr
    assert "5 pictures in" in first.stderr
    assert "1 of 5 pictures could not be read" in first.stderr
    pictures[1].write_bytes(pictures[0].read_bytes())
    again = usetta("classify", pictures[0].parent, *options, "--out", out)
    assert again.exit_code == 0, again.output
    assert "1 pictures in" in again.stderr
    assert "4 were there already" in again.stderr
    rows = {row["key"]: row for row in parquet.read_table(out).to_pylist()}
    assert sorted(rows) == [f"picture-{i}.png" for i in range(5)]
    console = usetta("classify", *pictures, *options)
    for line, picture in zip(console.stdout.splitlines(), pictures, strict=True):
        row = rows[picture.name]
        assert line.startswith(f"{picture}  {row['label']}  {row['confidence']:.1%}"), "as without --out"
    other = usetta("classify", pictures[0].parent, *options, "--seed", 1, "--out", out)
    assert other.exit_code == 2
    assert "were made with another seed: it was 0 and is 1. Choose another directory with --out" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "ray"], "say where with --out"),
        (["--engine", "spark", "--out", "there"], "unknown engine 'spark'; known are local and ray"),
        (["--out", "there", "--json"], "leave --json and --csv out"),
        (["--out", "there", "--method", "ues"], "did you mean 'use'"),
        (["--out", "there", "--views", "1"], "needs at least 2, not 1"),
        (["--out", "there", "nowhere"], "nowhere: no such file or folder"),
        (["@list.txt"], "@list.txt is a list, table, archive or URL: these need --out DIR"),
        (["s3://bucket/pictures"], "these need --out DIR"),
    ],
)
def test_wrong_usage_exits_with_2(
    options: list[object],
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = usetta("classify", pictures[0], *options, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "there").exists()


def test_a_folder_without_pictures_is_told(options: list[object], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = usetta("classify", tmp_path / "empty", *options, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"no pictures in {tmp_path / 'empty'}" in result.stderr


def test_the_options_of_an_engine_reach_it_and_workers_load_the_same_model(
    options: list[object], pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is given by a relative path, and workers are somewhere else."""
    seen: list[Any] = []

    def run(engine: RayCluster, hire: Any, works: Any) -> Any:
        monkeypatch.chdir("/")
        hand = hire()
        seen.append(engine)
        for work in works:
            yield work, next(hand.run([work]))

    monkeypatch.setattr(RayCluster, "run", run)
    monkeypatch.chdir(Path(str(options[3])).parent)
    options[3] = Path(str(options[3])).name
    cluster = ["--engine", "ray", "--address", "10.0.0.1:6379", "--workers", 3, "--cpus-per-worker", 2]
    result = usetta("classify", pictures[0].parent, *options, "--out", tmp_path / "out", *cluster)
    assert result.exit_code == 0, result.output
    assert seen == [RayCluster("10.0.0.1:6379", 3, 2.0, 0.0)]
    assert len(parquet.read_table(tmp_path / "out")) == 5
    monkeypatch.chdir(Path(str(options[3])).parent)


def test_an_evaluation_uses_the_engine_as_well(
    tiny_checkpoint: Path, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for picture in pictures:
        home = tmp_path / "zoo" / ("cat" if picture.stem[-1] in "02" else "red fox")
        home.mkdir(parents=True, exist_ok=True)
        picture.rename(home / picture.name)
    seen: list[Any] = []

    def run(engine: RayCluster, hire: Any, works: Any) -> Any:
        seen.append(engine)
        hand = hire()
        for work in works:
            for part in reversed(work.parts()):
                yield part, next(hand.run([part]))

    monkeypatch.setattr(RayCluster, "run", run)
    command = ["eval", "--data", tmp_path / "zoo", "--model", tiny_checkpoint, "--views", 4, "--methods", "clip,use"]
    remote = usetta(*command, "--out", tmp_path / "there", "--engine", "ray", "--gpus-per-worker", 0)
    local = usetta(*command, "--out", tmp_path / "here")
    assert (remote.exit_code, local.exit_code) == (0, 0), remote.output
    assert remote.stdout == local.stdout
    assert "zoo, seed 0: clip" in remote.stderr
    assert seen == [RayCluster("auto", None, 1.0, 0.0)]
