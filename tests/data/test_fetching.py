"""Getting a dataset, against a server on this machine; and that the table of sources is sound."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from data.archives import tar_of, zip_of
from data.miniature import IMAGE, SPLITS, make_split, put, small
from data.server import Shelf
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
        """Serve `content` as the archive of `name`, and let the paper's counts be those of the miniature."""
        source = source_of(name)
        assert source.archive is not None
        file = urlsplit(source.archive.url).path.rsplit("/", 1)[1]
        self.shelf.files[file] = content
        published = checksum and f"{checksum}:{hashlib.new(checksum, content).hexdigest()}"
        archive = replace(source.archive, url=f"{self.shelf.url}/{file}", checksum=published)
        offered = replace(small(name, images, classes), source=replace(source, archive=archive))
        self.monkeypatch.setattr("usetta.data.fetching.DATASETS", {name: offered})

    def fetch(self, name: str, *, keep_archive: bool = False) -> tuple[str, tuple[str, ...]]:
        fetched = fetch(name, self.root, self.logged.append, keep_archive=keep_archive)
        return fetched.report.state, fetched.by_hand


def source_of(name: str) -> Source:
    source = DATASETS.get(name).source
    assert source is not None
    return source


@pytest.fixture
def shop(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Shop:
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
def test_images_come_by_themselves_and_the_list_by_hand(shop: Shop, name: str) -> None:
    shop.offer(name, ARCHIVES[name])
    state, by_hand = shop.fetch(name)
    source = source_of(name)
    assert state == "no list"
    assert by_hand == (
        f"Download {source.list_file} from {source.list_url} and put it into {shop.root / source.folder}/.",
    )
    make_split(shop.root, name, images=False)  # what the step says
    assert shop.fetch(name) == ("complete", ())
    assert load_dataset(name, shop.root).layout == f"{SPLITS[name][1]}, listed in {source.folder}/{source.list_file}"
    assert len(shop.shelf.requests) == 1


@pytest.mark.parametrize("name", ARCHIVES)
def test_with_the_list_there_the_set_is_complete_at_once(shop: Shop, name: str) -> None:
    shop.offer(name, ARCHIVES[name])
    make_split(shop.root, name, images=False)
    assert shop.fetch(name) == ("complete", ())


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
    assert not (shop.root / "oxford_pets").exists()
    assert not list(shop.root.rglob("images.tar.gz*"))
    shop.shelf.files["images.tar.gz"] = ARCHIVES["pets"]
    assert shop.fetch("pets")[0] == "no list"


def test_a_cut_connection_is_continued(shop: Shop, pauses: list[float]) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.shelf.cuts = [100, 50]
    assert shop.fetch("pets")[0] == "no list"
    assert [asked for _, asked, _ in shop.shelf.requests] == [None, "bytes=100-", "bytes=150-"]
    assert pauses == [1, 2]


def test_a_download_of_an_earlier_call_is_continued(shop: Shop) -> None:
    shop.offer("pets", ARCHIVES["pets"])
    shop.shelf.cuts = [20] * 8
    with pytest.raises(DataError, match="failed 8 times"):
        shop.fetch("pets")
    assert load_is_refused(shop.root)
    assert shop.fetch("pets")[0] == "no list"
    assert shop.shelf.requests[-1][1] == "bytes=160-"


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
    assert shop.fetch("pets")[0] == "no list"
    assert shop.shelf.requests == []
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
    assert len(shop.shelf.requests) == 2
    files = [path.relative_to(shop.root).as_posix() for path in shop.root.rglob("*") if path.is_file()]
    assert files == [".usetta/pets.lock"]
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
    assert shop.fetch("pets")[0] == "no list"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("imagenet", ["https://image-net.org/download.php", "{folder}/images/val/n01440764/"]),
        ("ucf101", ["UCF-101-midframes.zip", "split_zhou_UCF101.json from https://drive.google.com/file/d/1I0S0q91hJ"]),
        ("cars", ["{folder}/cars_test/", "split_zhou_StanfordCars.json"]),
        ("sun397", ["https://vision.princeton.edu/projects/2010/SUN/SUN397.tar.gz", "split_zhou_SUN397.json"]),
    ],
)
def test_where_only_people_can_go_the_steps_are_returned(tmp_path: Path, name: str, parts: list[str]) -> None:
    logged: list[str] = []
    fetched = fetch(name, tmp_path / "new", logged.append)
    assert fetched.report.state == "absent"
    assert len(fetched.by_hand) == 2
    folder = tmp_path / "new" / source_of(name).folder
    for step, part in zip(fetched.by_hand, parts, strict=True):
        assert part.format(folder=folder) in step
        assert "{" not in step
    assert logged == []


def test_steps_that_were_taken_are_not_repeated(tmp_path: Path) -> None:
    make_split(tmp_path, "ucf101", images=False)
    assert len(fetch("ucf101", tmp_path, print).by_hand) == 1
    make_split(tmp_path, "cars").unlink()
    assert [step.split()[1] for step in fetch("cars", tmp_path, print).by_hand] == ["split_zhou_StanfordCars.json"]


def test_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UnknownDatasetError, match="did you mean 'pets'"):
        fetch("pet", tmp_path, print)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_the_sources_of_the_fifteen_are_sound(benchmark: NamedDataset) -> None:
    source = source_of(benchmark.name)
    assert source.folder in benchmark.aliases
    assert bool(source.archive) != bool(source.by_hand)
    assert bool(source.list_url) == bool(source.list_file)
    if source.archive:
        assert source.archive.url.startswith("https://")
        assert re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", source.archive.checksum or f"md5:{'0' * 32}")
        assert source.archive.target.startswith(source.folder)
