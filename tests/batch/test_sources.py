"""Images from folders, patterns, lists, Parquet files and tars, on disk and behind URLs."""

import errno
import hashlib
import io
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from conftest import make_image
from data.server import Shelf, serve
from usetta import images as image_files
from usetta import web
from usetta.batch import sources
from usetta.batch.sources import BatchImage, SourceError, SourceOptions, check, images
from usetta.images import ImageError, describe_ignored, open_image


def png(seed: int) -> bytes:
    file = io.BytesIO()
    make_image(seed).save(file, "PNG")
    return file.getvalue()


URLS = SourceOptions(allow_urls=True)


def identities(*places: object, column: str | None = None) -> list[tuple[str, str]]:
    options = SourceOptions(column, allow_urls=True)
    return [(image.source, image.key) for image in images([str(place) for place in places], options)]


def opened(image: BatchImage) -> Image.Image:
    return open_image(image.read())


def same(image: BatchImage, seed: int) -> bool:
    return opened(image).tobytes() == make_image(seed).tobytes()


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Four images in folders, and other files."""
    root = tmp_path / "zoo"
    for seed, name in enumerate(("b/2.png", "a.png", "b/1.png", "b/deep/x.JPEG")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(seed))
    (root / "notes.md").write_text("no image")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "h.png").write_bytes(png(9))
    (root / "b" / ".h.png").write_bytes(png(9))
    return root


def test_a_folder_gives_its_images_in_order_by_their_path_in_it(zoo: Path) -> None:
    assert identities(zoo) == [(str(zoo), key) for key in ("a.png", "b/1.png", "b/2.png", "b/deep/x.JPEG")]
    assert [same(image, seed) for image, seed in zip(images([str(zoo)]), (1, 2, 0, 3), strict=True)] == [True] * 4


def test_links_to_folders_are_followed_once(zoo: Path) -> None:
    (zoo / "b" / "round").symlink_to(zoo)
    (zoo / "c").symlink_to(zoo / "b" / "deep")
    keys = [key for _, key in identities(zoo)]
    assert sorted(Path(key).name for key in keys) == ["1.png", "2.png", "a.png", "x.JPEG"]


def test_a_folder_is_read_lazily(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    scandir = os.scandir

    def watched(path: Any) -> Any:
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(sources.os, "scandir", watched)
    stream = images([str(zoo)])
    assert next(stream).key == "a.png"
    assert listed == [str(zoo)]


def test_a_pattern_an_image_and_a_relative_folder(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(zoo.parent)
    assert sorted(identities("zoo/*/*.png")) == [("zoo/*/*.png", "zoo/b/1.png"), ("zoo/*/*.png", "zoo/b/2.png")]
    assert sorted(identities("zoo/b/d*")) == [("zoo/b/deep", "x.JPEG")]
    assert len(identities("zoo/**")) >= 4
    assert identities("zoo/a.png") == [("zoo/a.png", "a.png")]
    (image,) = images(["zoo/a.png"])
    assert image.place == str(zoo / "a.png"), "a worker in another folder finds it"
    assert identities("zoo/b/deep") == [("zoo/b/deep", "x.JPEG")]
    (zoo / "odd[1].png").write_bytes(png(5))  # a name, not a pattern
    assert identities("zoo/odd[1].png") == [("zoo/odd[1].png", "odd[1].png")]


@pytest.mark.parametrize("written", ["@{}", "{}"])
def test_a_list_holds_paths_relative_to_itself_and_urls(zoo: Path, written: str) -> None:
    names = zoo / "list.txt"
    names.write_text(f"b/1.png\n\n {zoo / 'a.png'} \nfile://{zoo / 'b/2.png'}\nnowhere.png\n", encoding="utf-8-sig")
    *three, absent = images([written.format(names)], URLS)
    assert {image.source for image in three} == {str(names)}
    assert [image.key for image in three] == ["b/1.png", str(zoo / "a.png"), f"file://{zoo / 'b/2.png'}"]
    assert [same(image, seed) for image, seed in zip(three, (2, 1, 0), strict=True)] == [True] * 3
    with pytest.raises(ImageError, match="no such file"):
        opened(absent)


def archive(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(("name", "mode"), [("shard.tar", "w"), ("shard.tar.gz", "w:gz"), ("shard.tgz", "w:gz")])
def test_a_tar_gives_its_images_by_the_names_of_the_members(tmp_path: Path, name: str, mode: str) -> None:
    members = {"0001.png": png(1), "0001.cls": b"3", "deep/0002.png": png(2), ".hidden.png": png(3)}
    shard = archive(tmp_path / name, members, mode)
    first, second = images([str(shard)])
    assert (first.key, second.key) == ("0001.png", "deep/0002.png")
    assert same(first, 1)
    assert same(second, 2)
    assert identities(tmp_path / "shard.t*") == identities(shard)


def test_a_damaged_tar_gives_what_it_has_and_reports_it(tmp_path: Path) -> None:
    whole = archive(tmp_path / "shard.tar", {f"{i}.png": png(i) for i in range(4)}).read_bytes()
    (tmp_path / "shard.tar").write_bytes(whole[: len(whole) // 2])
    *intact, rest = images([str(tmp_path / "shard.tar")])
    assert 1 <= len(intact) <= 2
    assert same(intact[0], 0)
    with pytest.raises(ImageError, match=r"the archive is damaged after \d.png"):
        rest.read()


def test_what_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(png(1))
    shard = archive(tmp_path / "shard.tar", {"a.png": png(1)})
    rows = table(tmp_path / "a.parquet", image=[png(1)])
    for place in (str(shard), f"file://{tmp_path / 'a.png'}", str(rows)):
        (image,) = images([place], URLS)
        with pytest.raises(ImageError, match="file is larger than the limit of 10 bytes"):
            image.read()


def table(file: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file


def test_parquet_with_paths_with_bytes_and_with_both(zoo: Path) -> None:
    paths = table(zoo / "paths.parquet", path=["a.png", str(zoo / "b/1.png"), None], size=[1, 2, 3])
    first, second, empty = images([str(paths)])
    assert [first.key, second.key, empty.key] == ["a.png", str(zoo / "b/1.png"), "2"]
    assert same(first, 1)
    assert same(second, 2)
    with pytest.raises(ImageError, match="file is empty"):
        opened(empty)
    data = table(zoo / "bytes.parquet", name=["x", "y", "z"], image=[png(4), png(5), b"no image"])
    first, second, bad = images([str(data)])
    assert [first.key, second.key, bad.key] == ["0", "1", "2"]
    assert same(second, 5)
    with pytest.raises(ImageError, match="not an image, or in an unsupported format"):
        opened(bad)
    hub = table(
        zoo / "hub.parquet", image=[{"bytes": png(6), "path": "x.png"}, {"bytes": None, "path": "a.png"}], label=[0, 1]
    )
    first, second = images([str(hub)])
    assert [first.key, second.key] == ["0", "a.png"]
    assert same(first, 6)
    assert same(second, 1)


def test_the_column_of_a_parquet_file_must_be_given_if_it_is_not_clear(tmp_path: Path) -> None:
    file = table(tmp_path / "t.parquet", a=["1.png"], b=["2.png"], n=[1])
    with pytest.raises(SourceError, match="may hold images, choose one with --column: a, b"):
        identities(file)
    assert identities(file, column="b") == [(str(file), "2.png")]
    with pytest.raises(SourceError, match="has no column 'c'; its columns are a, b, n"):
        identities(file, column="c")
    with pytest.raises(SourceError, match="column 'n' of .* holds int64, neither paths nor bytes"):
        identities(file, column="n")
    with pytest.raises(SourceError, match="has no column of paths or image bytes; its columns are n"):
        identities(table(tmp_path / "n.parquet", n=[1]))
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(SourceError, match="is damaged or not a Parquet file"):
        identities(tmp_path / "text.parquet")


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serve() as shelf:
        yield shelf


@pytest.fixture
def memory(zoo: Path) -> Iterator[Any]:
    """The same images behind URLs."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    for path in sorted(zoo.rglob("*")):
        if path.is_file():
            system.pipe(f"/zoo/{path.relative_to(zoo).as_posix()}", path.read_bytes())
    yield system
    system.rm("/zoo", recursive=True)


def test_urls_are_folders_patterns_lists_tables_tars_and_images(memory: Any, tmp_path: Path) -> None:
    all_images = list(images(["memory://zoo"], URLS))
    assert sorted(image.key for image in all_images) == ["a.png", "b/1.png", "b/2.png", "b/deep/x.JPEG"]
    assert same(next(image for image in all_images if image.key == "b/1.png"), 2)
    (image,) = images(["memory://zoo/a.png"], URLS)
    assert same(image, 1)
    assert [key for _, key in identities("memory://zoo/b/*.png")] == ["memory:///zoo/b/1.png", "memory:///zoo/b/2.png"]
    memory.pipe("/zoo/list.txt", b"b/1.png\nmemory://zoo/a.png\n")
    assert [same(image, n) for image, n in zip(images(["@memory://zoo/list.txt"], URLS), (2, 1), strict=True)] == [
        True
    ] * 2
    memory.pipe("/zoo/s.tar", archive(tmp_path / "s.tar", {"0.png": png(7)}).read_bytes())
    memory.pipe("/zoo/t.parquet", table(tmp_path / "t.parquet", path=["a.png"]).read_bytes())
    tar, row = images(["memory://zoo/s.tar", "memory://zoo/t.parquet"], URLS)
    assert same(tar, 7)
    assert same(row, 1)
    (absent,) = images(["memory://zoo/absent.png"], URLS)
    with pytest.raises(ImageError, match="cannot be fetched: no such file"):
        absent.read()


def test_web_servers_are_asked_within_limits_and_only_if_allowed(
    zoo: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.files = {"a.png": png(1), "s.tar": archive(zoo / "s.tar", {"0.png": png(7)}).read_bytes(), "l.txt": b"a.png"}
    shelf.redirects = {"/moved.png": "/a.png", "/loop.png": "/loop.png", "/ftp.png": "ftp://example.org/a.png"}
    places = [f"{shelf.url}/{name}" for name in ("a.png", "moved.png?size=*", "s.tar", "l.txt")]
    shelf.redirects["/moved.png?size=*"] = "/a.png"
    assert [same(image, seed) for image, seed in zip(images(places, URLS), (1, 1, 7, 1), strict=True)] == [True] * 4
    with pytest.raises(SourceError, match=r"a\.png: URLs are opened only with --allow-urls"):
        check(places)
    with pytest.raises(SourceError, match=r"absent\.txt cannot be read: HTTP 404 Not Found"):
        list(images([f"{shelf.url}/absent.txt"], URLS))
    (zoo / "list.txt").write_text(places[0])
    (refused,) = images([str(zoo / "list.txt")])
    assert (refused.name, refused.problem) == (places[0], "URLs are opened only with --allow-urls")

    def reason(name: str) -> str:
        (image,) = images([f"{shelf.url}/{name}"], URLS)
        with pytest.raises(ImageError) as caught:
            image.read()
        return caught.value.reason

    assert reason("absent.png") == "cannot be fetched: HTTP 404 Not Found"
    assert "redirect" in reason("loop.png")
    assert reason("ftp.png").endswith("redirected to ftp://example.org/a.png, which is neither http nor https")
    monkeypatch.setattr(sources, "MAX_BYTES", 10)
    assert reason("a.png") == "cannot be fetched: file is larger than the limit of 10 bytes"
    monkeypatch.setattr(sources, "MAX_BYTES", 10**6)
    monkeypatch.setattr(web, "SECONDS", -1.0)
    assert reason("a.png") == "cannot be fetched: the server took longer than -1 s"
    assert len([path for path, _, _ in shelf.requests if path == "/loop.png"]) <= web.REDIRECTS + 1


def test_images_that_cannot_be_read_here_are_counted(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "_can_open", lambda name: name == "AVIF")
    for name in ("1.heic", "b/2.HEIC", "3.avif", "4.dng", ".5.heic", "6.txt"):
        (zoo / name).touch()
    options = SourceOptions()
    assert "3.avif" in [image.key for image in images([str(zoo)], options)]
    assert describe_ignored(options.ignored) == (
        "3 files ignored: 2 .heic (pip install 'usetta[heif]'), 1 .dng (convert to JPEG or PNG)"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: no such file or folder"),
        ("@nowhere.txt", "nowhere.txt: no such file or folder"),
        ("strange://a/b.png", "^strange://a/b.png cannot be opened: Protocol not known"),
        ("@strange://a/list.txt", "^strange://a/list.txt cannot be opened: Protocol not known"),
        ("memory://nowhere/list.txt", "cannot be read: no such file"),
    ],
)
def test_missing_sources_are_reported(source: str, message: str) -> None:
    pytest.importorskip("fsspec")

    def use() -> None:
        check([source], URLS)
        for _ in images([source], URLS):
            pass

    with pytest.raises(SourceError, match=message):
        use()


def test_an_image_from_standard_input_must_be_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SourceError, match="'-' reads an image from standard input: pipe one into this command"):
        check(["-"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(png(3))))
    check(["-"])
    (image,) = images(["-"])
    assert same(image, 3)
    assert (image.source, image.key) == ("-", hashlib.blake2b(png(3), digest_size=16).hexdigest())


def test_a_folder_that_goes_away_while_it_is_read_is_reported(zoo: Path) -> None:
    stream = images([str(zoo)])
    assert next(stream).key == "a.png"
    shutil.rmtree(zoo / "b")
    with pytest.raises(SourceError, match=f"^{zoo / 'b'} cannot be listed: no such file$"):
        next(stream)


def test_a_storage_that_fails_is_reported(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(type(memory), "ls", fail)
    with pytest.raises(SourceError, match="^memory://zoo cannot be listed: Input/output error$"):
        list(images(["memory://zoo"], URLS))
    monkeypatch.setattr(type(memory), "isdir", fail)
    with pytest.raises(SourceError, match="^memory://zoo cannot be read: Input/output error$"):
        list(images(["memory://zoo"], URLS))


def test_a_list_that_ends_early_is_reported_after_its_first_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class Line(io.RawIOBase):
        """One line, and then the connection is lost."""

        parts = iter((b"http://example.org/a.png\n",))

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            for part in self.parts:
                buffer[: len(part)] = part
                return len(part)
            raise ConnectionResetError(errno.ECONNRESET, "")

    monkeypatch.setattr(sources, "open_url", lambda url: io.BufferedReader(Line()))
    stream = images(["http://example.org/list.txt"], URLS)
    assert next(stream).key == "http://example.org/a.png"
    with pytest.raises(SourceError, match="list.txt: reading stopped before the end: Connection reset by peer"):
        next(stream)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SourceError, match=r"s3://zoo/a.png needs fsspec: pip install 'usetta\[cluster\]'"):
        list(images(["s3://zoo/a.png"], URLS))


def test_names_that_are_not_valid_text_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    (tmp_path / name).write_bytes(png(1))
    (image,) = images([str(tmp_path)])
    assert image.key == r"caf\udce9.png"
    assert same(image, 1)


def test_a_list_may_be_endless(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    os.mkfifo(names)

    def write() -> None:
        with suppress(BrokenPipeError), names.open("w") as file:
            for number in count():
                file.write(f"image-{number}.jpg\n")

    writer = threading.Thread(target=write)
    writer.start()
    with closing(images([str(names)])) as stream:
        assert [image.key for image in islice(stream, 1000)][-1] == "image-999.jpg"
    writer.join(timeout=30)
    assert not writer.is_alive()
