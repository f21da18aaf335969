"""Archives, good and bad."""

import errno
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from data.archives import tar_of, zip_of
from usetta.data import DataError
from usetta.data.unpacking import unpack

FILES = {"set/images/a/1.jpg": b"one", "set/images/2.jpg": b"two", "set/notes.txt": b"no", "README": b"no"}


def below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_one_folder_is_taken_out(tmp_path: Path, kind: str, prefix: str) -> None:
    files = {f"{prefix}{name}": content for name, content in FILES.items()}
    archive = tmp_path / "set.tar.gz"  # the name does not decide
    archive.write_bytes(zip_of(files) if kind == "zip" else tar_of(files, kind))
    unpack(archive, "set/images", tmp_path / "home" / "images")
    assert below(tmp_path / "home") == {"images/a/1.jpg": b"one", "images/2.jpg": b"two"}
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["images"]


def test_an_archive_in_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "outer.zip"
    archive.write_bytes(zip_of({"outer/inner.tar.gz": tar_of(FILES, "gz"), "outer/more.txt": b"no"}))
    unpack(archive, "set/images", tmp_path / "images", within="outer/inner.tar.gz")
    assert below(tmp_path / "images") == {"a/1.jpg": b"one", "2.jpg": b"two"}
    with pytest.raises(DataError, match=r"the archive does not contain outer/absent\.tar"):
        unpack(archive, "set/images", tmp_path / "other", within="outer/absent.tar")


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../escaped.jpg"),
        tarfile.TarInfo("set/images/../../../escaped.jpg"),
        link("set/images/out", "../../../.."),
        link("set/images/passwd", "/etc/passwd"),
        link("set/images/hard", "../../outside", tarfile.LNKTYPE),
        link("set/images/pipe", "", tarfile.FIFOTYPE),
    ],
    ids=lambda member: member.name,
)
def test_a_tar_that_leads_out_is_refused_whole(tmp_path: Path, member: tarfile.TarInfo) -> None:
    archive = tmp_path / "set.tar"
    with tarfile.open(archive, "w") as tar:
        good = tarfile.TarInfo("set/images/1.jpg")
        good.size = 3
        tar.addfile(good, io.BytesIO(b"one"))
        tar.addfile(member)
    with pytest.raises(DataError, match=r"set\.tar is not safe to unpack: .*; nothing was unpacked"):
        unpack(archive, "set/images", tmp_path / "home" / "images")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "set.tar"]
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../escaped.jpg", "set/images/../../../x.jpg", "/absolute.jpg", "C:/x.jpg", "set\\images\\..\\..\\..\\x.jpg"],
)
def test_a_zip_that_leads_out_is_refused_whole(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "set.zip"
    archive.write_bytes(zip_of({"set/images/1.jpg": b"one", name: b"out"}))
    with pytest.raises(DataError, match=r"set\.zip is not safe to unpack"):
        unpack(archive, "set/images", tmp_path / "home" / "images")
    assert sorted(below(tmp_path)) == ["set.zip"]


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "set.zip"
    with zipfile.ZipFile(archive, "w") as members:
        info = zipfile.ZipInfo("set/images/passwd")
        info.external_attr = 0o120777 << 16
        members.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="it contains set/images/passwd"):
        unpack(archive, "set/images", tmp_path / "images")


@pytest.mark.parametrize(
    "content",
    [b"", b"not an archive", tar_of(FILES, "gz")[:60], zip_of(FILES)[:-30]],
    ids=["empty", "text", "cut tar", "cut zip"],
)
def test_a_damaged_archive_is_reported(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "set.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"set\.tar\.gz is damaged: .*; download it again"):
        unpack(archive, "set/images", tmp_path / "images")
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar.gz"]


def test_a_corrupt_member_is_reported(tmp_path: Path) -> None:
    archive = tmp_path / "set.zip"
    archive.write_bytes(zip_of({"set/images/1.jpg": b"unmistakable"}).replace(b"unmistakable", b"unmistaXable"))
    with pytest.raises(DataError, match=r"set\.zip is damaged: Bad CRC"):
        unpack(archive, "set/images", tmp_path / "images")
    assert not (tmp_path / "images").exists()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_corrupt_compression_is_reported(tmp_path: Path, kind: str) -> None:
    content = bytearray(tar_of({"set/images/1.jpg": bytes(range(256)) * 200}, kind))
    content[len(content) // 2] ^= 255
    archive = tmp_path / "set.tar"
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"set\.tar is damaged: .*; download it again"):
        unpack(archive, "set/images", tmp_path / "images")
    assert not (tmp_path / "images").exists()


def test_a_full_disk_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    archive = tmp_path / "set.tar"
    archive.write_bytes(tar_of(FILES))
    with pytest.raises(OSError, match="No space left on device"):
        unpack(archive, "set/images", tmp_path / "images")
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar"]


def test_an_archive_of_something_else_is_reported(tmp_path: Path) -> None:
    archive = tmp_path / "set.tar"
    archive.write_bytes(tar_of(FILES))
    with pytest.raises(
        DataError, match=r"set\.tar does not contain the folder set/photos; the source may have changed"
    ):
        unpack(archive, "set/photos", tmp_path / "images")
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    archive = tmp_path / "set.tar"
    archive.write_bytes(tar_of(FILES))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.jpg").write_bytes(b"mine")
    with pytest.raises(DataError, match="images already exists; move it away"):
        unpack(archive, "set/images", tmp_path / "images")
    assert below(tmp_path / "images") == {"mine.jpg": b"mine"}


def test_an_empty_folder_and_leftovers_of_a_killed_run_are_no_hindrance(tmp_path: Path) -> None:
    archive = tmp_path / "set.tar"
    archive.write_bytes(tar_of(FILES))
    (tmp_path / "images").mkdir()
    (tmp_path / ".images.unpacking" / "set" / "images").mkdir(parents=True)
    (tmp_path / ".images.unpacking" / "set" / "images" / "half.jpg").write_bytes(b"ha")
    unpack(archive, "set/images", tmp_path / "images")
    assert below(tmp_path / "images") == {"a/1.jpg": b"one", "2.jpg": b"two"}
