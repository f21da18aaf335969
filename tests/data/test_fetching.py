"""Getting a dataset, against a server on this machine; and that the table of sources is sound."""

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from data.archives import tar_of, zip_of
from data.miniature import IMAGE, SPLITS, make_split, put, small
from data.server import Shelf
from data.world import blob_id, list_of, point_to
from usetta.data import DataError, NamedDataset, Source, UnknownDatasetError, fetch, load_dataset
from usetta.data.benchmark import BENCHMARKS
from usetta.data.fetching import exclusive
from usetta.data.layouts import class_folders
from usetta.data.named import DATASETS


@dataclass
class Shop:
    """A root to fetch to, and the server that stands for the sources."""

    shelf: Shelf
    root: Path
    monkeypatch: pytest.MonkeyPatch
    logged: list[str]

    def offer(
        self, name: str, content: bytes, *, checksum: str | None = "md5", images: int = 3, classes: int = 4
    ) -> None:
        """Serve `content` as the archive of `name`, and its list, with the counts of the miniature; no mirrors."""
        source = source_of(name)
        assert source.archive is not None
        file = urlsplit(source.archive.url).path.rsplit("/", 1)[1]
        self.shelf.files[file] = content
        published = checksum and f"{checksum}:{hashlib.new(checksum, content).hexdigest()}"
        archive = replace(source.archive, url=f"{self.shelf.url}/{file}", checksum=published)
        split = source.split and replace(source.split, blob=blob_id(list_of(name)))
        if split:
            self.shelf.files |= {f"raw/{place}": list_of(name) for place in split.places}
        offered = replace(
            small(name, images, classes), source=replace(source, archive=archive, split=split, mirrors=())
        )
        self.monkeypatch.setattr("usetta.data.fetching.DATASETS", {name: offered})

    def hide_lists(self) -> None:
        for file in [file for file in self.shelf.files if file.startswith("raw/")]:
            del self.shelf.files[file]

    def fetch(self, name: str, *, keep_archive: bool = False) -> tuple[str, tuple[str, ...]]:
        fetched = fetch(name, self.root, self.logged.append, keep_archive=keep_archive)
        return fetched.report.state, fetched.by_hand

    @property
    def ranges(self) -> list[str | None]:
        """What was asked for of archives."""
        return [asked for path, asked, _ in self.shelf.requests if not path.startswith("/raw/")]


def source_of(name: str) -> Source:
    source = DATASETS.get(name).source
    assert source is not None
    return source


@pytest.fixture
def shop(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Shop:
    for name, value in (point_to(shelf.url) | {"USETTA_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    return Shop(shelf, tmp_path / "data", monkeypatch, [])


def images_of(name: str, prefix: str) -> dict[str, bytes]:
    return {f"{prefix}/{image}": IMAGE for image, _, _ in SPLITS[name][0]}


ARCHIVES = {
    "dtd": tar_of(images_of("dtd", "dtd/images") | {"dtd/labels/train1.txt": b"x"}, "gz"),
    "flowers102": tar_of(images_of("flowers102", "jpg"), "gz"),
    "caltech101": zip_of(
        {
            "caltech-101/101_ObjectCategories.tar.gz": tar_of(images_of("caltech101", "101_ObjectCategories"), "gz"),
            "caltech-101/Annotations.tar": tar_of({"Annotations/a.mat": b"x"}),
            "__MACOSX/caltech-101/._x": b"x",
        }
    ),
    "pets": tar_of(images_of("pets", "images"), "gz"),
    "eurosat": zip_of(images_of("eurosat", "2750")),
    "food101": tar_of(images_of("food101", "food-101/images") | {"food-101/meta/test.txt": b"x"}, "gz"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_images_and_list_come_by_themselves(shop: Shop, name: str) -> None:
    shop.offer(name, ARCHIVES[name])
    source = source_of(name)
    assert source.split
    assert shop.fetch(name) == ("complete", ())
    assert load_dataset(name, shop.root).layout == f"{SPLITS[name][1]}, listed in {source.folder}/{source.split.file}"
    assert len(shop.shelf.requests) == 2


def test_a_list_is_downloaded_once_and_verified(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    split = source_of("pets").split
    assert split
    shop.shelf.files[f"raw/{split.places[0]}"] = b"another"
    make_split(shop.root, "pets").unlink()  # the images are there
    assert shop.fetch("pets") == ("complete", ())
    assert [path for path, _, _ in shop.shelf.requests] == [f"/raw/{place}" for place in split.places]
    assert any("the blob of the download is" in line for line in shop.logged)
    (shop.root / "oxford_pets" / split.file).unlink()
    assert shop.fetch("pets") == ("complete", ())
    assert len(shop.shelf.requests) == 2


def test_where_no_list_can_be_downloaded_people_can(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.hide_lists()
    split, folder = source_of("pets").split, shop.root / "oxford_pets"
    assert split
    assert shop.fetch("pets") == ("no list", (f"Download {split.file} from {split.url} and put it into {folder}/.",))
    make_split(shop.root, "pets", images=False)  # what the step says
    assert shop.fetch("pets") == ("complete", ())
    assert len(shop.ranges) == 1


def test_aircraft_needs_no_list(shop: Shop) -> None:
    data = "fgvc-aircraft-2013b/data"
    files = {
        f"{data}/variants.txt": b"707-320\n727-200\n",
        f"{data}/images_variant_test.txt": b"1 727-200\n2 707-320\n",
    }
    files |= {f"{data}/images/1.jpg": IMAGE, f"{data}/images/2.jpg": IMAGE, "fgvc-aircraft-2013b/README.md": b"x"}
    shop.offer("aircraft", tar_of(files), images=2, classes=2)
    assert shop.fetch("aircraft") == ("complete", ())
    assert load_dataset("aircraft", shop.root).labels == (1, 0)


@pytest.mark.parametrize(
    ("name", "inside", "place"),
    [
        ("imagenet-a", "imagenet-a", "imagenet-adversarial/imagenet-a"),
        ("imagenet-r", "imagenet-r", "imagenet-rendition/imagenet-r"),
        (
            "imagenet-v2",
            *["imagenetv2-matched-frequency-format-val", "imagenetv2/imagenetv2-matched-frequency-format-val"],
        ),
        ("imagenet-sketch", "sketch", "imagenet-sketch/images"),
    ],
)
def test_the_relatives_of_imagenet(shop: Shop, name: str, inside: str, place: str) -> None:
    folders = class_folders(name)
    files = {f"{inside}/{folder}/1.jpg": IMAGE for folder in folders} | {f"{inside}/README.txt": b"x"}
    content = zip_of(files) if name == "imagenet-sketch" else tar_of(files)
    checksum = None if name == "imagenet-sketch" else "sha256"
    shop.offer(name, content, checksum=checksum, images=len(folders), classes=len(folders))
    assert shop.fetch(name) == ("complete", ())
    assert load_dataset(name, shop.root).layout == place
    line = f"ImageNet-Sketch.zip has no published checksum; its SHA-256 is {hashlib.sha256(content).hexdigest()}"
    assert (line in shop.logged) == (name == "imagenet-sketch")


def test_a_second_call_does_nothing(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    make_split(shop.root, "pets", images=False)
    shop.fetch("pets")
    before = {path: path.stat().st_mtime_ns for path in shop.root.rglob("*")}
    logged = list(shop.logged)
    assert shop.fetch("pets") == ("complete", ())
    assert {path: path.stat().st_mtime_ns for path in shop.root.rglob("*")} == before
    assert (len(shop.shelf.requests), shop.logged) == (1, logged)


def test_what_was_downloaded_is_noted_and_the_archive_removed(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.fetch("pets")
    content = ARCHIVES["pets"]
    md5 = hashlib.md5(content).hexdigest()
    note = json.loads((shop.root / ".usetta" / "pets.json").read_text())
    assert note["url"] == f"{shop.shelf.url}/images.tar.gz"
    assert (note["bytes"], note["md5"]) == (len(content), md5)
    assert note["sha256"] == hashlib.sha256(content).hexdigest()
    assert note["published_checksum"] == f"md5:{md5}"
    assert sorted(path.name for path in (shop.root / ".usetta").iterdir()) == ["pets.json", "pets.lock"]


def test_the_archive_may_be_kept(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.fetch("pets", keep_archive=True)
    assert (shop.root / ".usetta" / "pets" / "images.tar.gz").read_bytes() == ARCHIVES["pets"]


def test_a_wrong_checksum_leaves_nothing(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.shelf.files["images.tar.gz"] = ARCHIVES["flowers102"]
    with pytest.raises(
        DataError, match=r"the md5 of the download is \w{32}, the published one is \w{32}; the file was del"
    ):
        shop.fetch("pets")
    assert not (shop.root / "oxford_pets" / "images").exists()
    assert not list(shop.root.rglob("images.tar.gz*"))
    shop.shelf.files["images.tar.gz"] = ARCHIVES["pets"]
    assert shop.fetch("pets")[0] == "complete"


def test_a_cut_connection_is_continued(shop: Shop, pauses: list[float]) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.shelf.troubles["/images.tar.gz"] = [-100, -50]
    assert shop.fetch("pets")[0] == "complete"
    assert shop.ranges == [None, "bytes=100-", "bytes=150-"]
    assert pauses == [1, 2]


def test_a_download_of_an_earlier_call_is_continued(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.shelf.troubles["/images.tar.gz"] = [-20] * 8
    with pytest.raises(DataError, match="failed 8 times"):
        shop.fetch("pets")
    assert load_is_refused(shop.root)
    assert shop.fetch("pets")[0] == "complete"
    assert shop.ranges[-1] == "bytes=160-"


def load_is_refused(root: Path) -> bool:
    with pytest.raises(DataError):
        load_dataset("pets", root)
    return True


def test_a_call_that_was_killed_before_unpacking_is_continued(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    file = shop.root / ".usetta" / "pets" / "images.tar.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(ARCHIVES["pets"])
    put(shop.root / "oxford_pets" / ".images.unpacking", ["images/Abyssinian_71.jpg"])
    assert shop.fetch("pets")[0] == "complete"
    assert shop.ranges == []
    assert len(list((shop.root / "oxford_pets" / "images").iterdir())) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [(tar_of({"images/a.jpg": b"x", "../escaped.jpg": b"x"}), "not safe to unpack"), (b"rubbish", "is damaged")],
)
def test_a_bad_archive_is_not_kept(shop: Shop, content: bytes, why: str) -> None:
    shop.offer("pets", content, checksum=None)
    for _ in range(2):
        with pytest.raises(DataError, match=why):
            shop.fetch("pets")
    assert len(shop.ranges) == 2
    files = {path.relative_to(shop.root).as_posix() for path in shop.root.rglob("*") if path.is_file()}
    assert files == {".usetta/pets.lock", "oxford_pets/split_zhou_OxfordPets.json"}
    assert not list(shop.root.parent.rglob("escaped.jpg"))


def test_what_is_there_is_never_overwritten(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    make_split(shop.root, "pets")
    (shop.root / "oxford_pets/images/Abyssinian_71.jpg").unlink()
    with pytest.raises(
        DataError, match=r"pets in .*: 1 listed images are missing.*; Unpack the archive again, or move"
    ):
        shop.fetch("pets")
    make_split(shop.root / "other", "pets", images=False)
    put(shop.root / "other/oxford_pets/images", ["mine.jpg"])
    shop.root = shop.root / "other"
    with pytest.raises(DataError, match="oxford_pets/images already exists; move it away"):
        shop.fetch("pets")
    assert shop.shelf.requests == []


def test_a_set_in_another_layout_is_not_downloaded_again(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    make_split(shop.root, "pets", "tpt")
    assert shop.fetch("pets") == ("complete", ())
    assert shop.shelf.requests == []


def test_two_fetches_do_not_meet(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    with (
        exclusive(shop.root / ".usetta" / "pets.lock", "pets"),
        pytest.raises(DataError, match="another process; wait"),
    ):
        shop.fetch("pets")
    assert shop.fetch("pets")[0] == "complete"


def test_a_system_without_locks_fetches_all_the_same(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with exclusive(shop.root / ".usetta" / "pets.lock", "pets"):
        assert shop.fetch("pets")[0] == "complete"


def test_what_only_people_can_do_is_returned_as_steps(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    small_ucf = replace(small("ucf101", 3, 4), source=replace(source_of("ucf101")))
    shop.monkeypatch.setattr("usetta.data.fetching.DATASETS", {"ucf101": small_ucf})
    make_split(shop.root, "ucf101", images=False)
    state, steps = shop.fetch("ucf101")
    assert (state, len(steps)) == ("absent", 1)
    assert f"unpack it in {shop.root / 'ucf101'}/." in steps[0]
    make_split(shop.root, "ucf101")
    assert shop.fetch("ucf101") == ("complete", ())


def test_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UnknownDatasetError, match="did you mean 'pets'"):
        fetch("pet", tmp_path, print)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_the_sources_of_the_fifteen_are_sound(benchmark: NamedDataset) -> None:
    source = source_of(benchmark.name)
    assert source.folder in benchmark.aliases
    assert source.archive or source.by_hand
    assert source.images.startswith(source.folder)
    assert source.licence
    assert all(re.fullmatch(r"[\w-]+/[\w-]+", mirror.repo) and mirror.bytes > 10**8 for mirror in source.mirrors)
    if source.split:
        assert len(source.split.places) == 2
        assert all(re.fullmatch(r"[\w-]+/[\w-]+/[0-9a-f]{40}/.+\.json", place) for place in source.split.places)
        assert re.fullmatch(r"[0-9a-f]{40}", source.split.blob)
    if source.archive:
        assert source.archive.url.startswith("https://")
        assert re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", source.archive.checksum or f"md5:{'0' * 32}")
        assert source.archive.target.startswith(source.folder)
        assert source.archive.bytes > 10**7
