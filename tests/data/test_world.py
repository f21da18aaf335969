"""Every dataset from nothing to complete, against a server that plays GitHub, the archives and the hub."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data import world
from data.archives import tar_of
from data.server import Shelf
from usetta.cli import app
from usetta.data import DataError, Dataset, Fetched, fetch, fetch_all, import_dataset, load_dataset, plan_fetch
from usetta.data.benchmark import BENCHMARKS
from usetta.data.mirrors import unpack_packed
from usetta.data.named import DATASETS
from usetta.data.packed import IndexedImage, scan, write_index
from usetta.images import file_digest


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def contents(name: str, root: Path) -> dict[str, str]:
    """What the keys of cached features depend on: ids and digests of the files."""
    return digests_of(load_dataset(name, root))


def digests_of(dataset: Dataset) -> dict[str, str]:
    digests = {}
    for image_id in dataset.ids:
        source = dataset.source(image_id)
        digests[image_id] = file_digest(source() if callable(source) else source)
    return digests


def test_all_fifteen_from_nothing(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    root, logged = tmp_path / "data", list[str]()
    results = fetch_all(plan_fetch([], root), root, logged.append)
    states = {name: result.report.state for name, result in results.items() if isinstance(result, Fetched)}
    assert states == {b.name: "absent" if b.name == "ucf101" else "complete" for b in BENCHMARKS}
    world.take_steps_by_hand(root)
    world.lay_out(tmp_path / "coop")
    for name in results:
        copy, original = load_dataset(name, root), load_dataset(name, tmp_path / "coop")
        assert (copy.fingerprint, copy.ids, copy.labels) == (original.fingerprint, original.ids, original.labels)
        assert contents(name, root) == contents(name, tmp_path / "coop")
        assert pickle.loads(pickle.dumps(copy)).source(copy.ids[0]) is not None
    assert "imagenet-r: axiong/imagenet-r cannot be used: it has 5 images instead of 6; it is another version" in (
        "\n".join(logged)
    )
    assert {path.split("/")[1] for path, _ in stocked.tokens} == {"hub"}  # the token goes nowhere else
    assert 1.0 in pauses  # what the server asked for


def test_killed_ten_times_everything_arrives(stocked: Shelf, tmp_path: Path) -> None:
    stocked.seconds = 0.01
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent / 'src'}"}
    command = [sys.executable, "-m", "data.world", str(tmp_path / "data"), stocked.url, "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == 0, done.stderr
    assert report["killed"] >= 3
    assert set(report["states"].values()) == {"complete"}
    assert report["left"] == []
    world.lay_out(tmp_path / "coop")
    assert report["fingerprints"] == {
        name: load_dataset(name, tmp_path / "coop").fingerprint for name in report["fingerprints"]
    }


def test_the_plan_is_printed_before_anything_is_fetched(
    stocked: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    shown = usetta("data", "fetch", "all", tmp_path / "data", "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert stocked.requests == []
    lines = {line.split()[0]: " ".join(line.split()) for line in shown.stdout.splitlines()}
    assert shown.stdout.count(" or hub: ") == 9
    assert shown.stdout.count(" list: GitHub") == 9
    assert lines["imagenet"].endswith("hub: ILSVRC/imagenet-1k (gated) non-commercial research and education")
    assert lines["ucf101"] == "ucf101 absent - by hand not checked"
    assert "GB to download" in shown.stdout.splitlines()[-1]


def test_mirrors_may_be_unpacked(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    names = "imagenet,cars,sun397,imagenet-a"
    done = usetta("data", "fetch", names, tmp_path / "data", "--unpack")
    assert done.exit_code == 0, done.stderr
    assert "cars: complete in stanford_cars, listed in stanford_cars/split_zhou_StanfordCars.json" in done.stdout
    world.lay_out(tmp_path / "coop")
    for name in names.split(","):
        assert contents(name, tmp_path / "data") == contents(name, tmp_path / "coop")
    assert not list((tmp_path / "data").rglob("packed"))


def test_without_a_token_a_gated_set_is_left_to_people(
    stocked: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refused = usetta("data", "fetch", "imagenet", tmp_path / "data")
    assert refused.exit_code == 1
    assert "ILSVRC/imagenet-1k is gated; accept its terms at" in refused.stderr
    assert "1. Accept the terms at https://huggingface.co/datasets/ILSVRC/imagenet-1k, set HF_TOKEN" in refused.stdout


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("checksum", "the sha256 of the download is"),
        ("rows", "it has 2 images without the names of the list, which has 3"),
        ("labels", "it has 3 images of '2000 AM General Hummer SUV', the list has 1"),
        ("no files", "clip-benchmark/wds_cars has no files test/*.tar"),
        ("damaged", "cannot be read in place"),
        ("listing", "wds_cars/tree/main/test is not a list of files; the hub may have changed"),
        ("outside", "clip-benchmark/wds_cars contains the path test/../../0.tar; refused"),
    ],
)
def test_a_mirror_that_is_not_the_dataset_is_refused(
    stocked: Shelf, tmp_path: Path, trouble: str, message: str, pauses: list[float]
) -> None:
    rows = [
        (f"s{n}", world.jpeg(f"cars/{image}"), label) for n, (image, label, _) in enumerate(world.SPLITS["cars"][0])
    ]
    if trouble == "labels":
        rows = [(key, content, 0) for key, content, _ in rows]
    content = b"x" * 600 if trouble == "damaged" else world.webdataset_of(rows[:2] if trouble == "rows" else rows)
    name = "other.tar" if trouble == "no files" else "test/0.tar"
    files = {name: content, "test/README": b"x"}
    for path in [path for path in stocked.files if "wds_cars" in path]:
        del stocked.files[path]
    world.put_on_hub(stocked, "clip-benchmark/wds_cars", files, wrong="test/0.tar" if trouble == "checksum" else "")
    listing = "hub/api/datasets/clip-benchmark/wds_cars/tree/main/test"
    if trouble == "listing":
        stocked.files[listing] = b'{"error": "moved"}'
    elif trouble == "outside":
        stocked.files[listing] = stocked.files[listing].replace(b"test/0.tar", b"test/../../0.tar")
    result = usetta("data", "fetch", "cars", tmp_path / "data")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not list((tmp_path / "data").rglob("*.tar"))


def test_when_no_source_works_all_problems_are_in_the_error(
    stocked: Shelf, tmp_path: Path, pauses: list[float]
) -> None:
    stocked.files = {path: content for path, content in stocked.files.items() if "imagenet-a" not in path}
    with pytest.raises(DataError) as caught:
        fetch("imagenet-a", tmp_path / "data", print)
    assert caught.value.problem.startswith("no source of imagenet-a can be used: ")
    assert caught.value.problem.count("; ") == 2, "an archive and two mirrors"
    assert caught.value.todo == "rerun the same command later"


def test_an_index_cannot_write_outside_of_its_dataset(tmp_path: Path) -> None:
    pets = DATASETS.get("pets")
    folder = tmp_path / "data" / "oxford_pets" / "packed"
    folder.mkdir(parents=True)
    (folder / "0.tar").write_bytes(tar_of({"a.jpg": b"x", "b.jpg": b"y"}))
    found = scan([folder / "0.tar"])
    ids = ("a.jpg", "../../../escaped.jpg")
    images = [IndexedImage(image, 0, row.file, row.place) for image, row in zip(ids, found.rows, strict=True)]
    write_index(folder, found, images, ["cat"], "by hand")
    with pytest.raises(
        DataError, match=r"is not safe to unpack: it contains \.\./.*escaped\.jpg; nothing was unpacked"
    ):
        unpack_packed(pets, tmp_path / "data", progress=False)
    assert not list(tmp_path.rglob("escaped.jpg"))
    assert (folder / "0.tar").is_file()


def numbered(name: str) -> list[tuple[str, bytes, int]]:
    """The images of a relative of ImageNet as copies have them that number their images: key, content, label."""
    wnids = [known.wnid for known in world.IMAGENET]
    images = world.images_of(name).items()
    return [(f"s{n:07d}", content, wnids.index(image.split("/")[0])) for n, (image, content) in enumerate(images)]


def test_a_copy_that_numbers_its_images_has_ids_of_its_own(stocked: Shelf, tmp_path: Path) -> None:
    files = {"test/0.tar": world.webdataset_of(numbered("imagenet-a")), "classnames.txt": b"other names\nthan\nours"}
    world.put_on_hub(stocked, "clip-benchmark/wds_imagenet-a", files)
    done = usetta("data", "fetch", "imagenet-a", tmp_path / "data")
    assert done.exit_code == 0, done.stderr
    assert "clip-benchmark/wds_imagenet-a on the hub, by class, with their own file names" in done.stdout
    copy = load_dataset("imagenet-a", tmp_path / "data")
    world.lay_out(tmp_path / "coop")
    original = load_dataset("imagenet-a", tmp_path / "coop")
    assert (copy.labels, copy.classes) == (original.labels, original.classes)
    assert copy.ids[-1] == f"{world.IMAGENET[-1].wnid}/s0000005.jpg"
    assert list(digests_of(copy).values()) == list(digests_of(original).values())


@pytest.mark.parametrize(
    ("name", "labels", "key", "message"),
    [
        ("imagenet-a", (0, 0, 1, 1, 2), "s{}", "it has 5 images instead of 6; it is another version of the dataset"),
        ("imagenet-a", (0, 0, 0, 1, 1, 1), "s{}", "it has no image of n01534433"),
        ("imagenet-a", (0, 0, 1, 7, 2, 2), "s{}", "1 of its images are of other classes, such as s3.jpg"),
        ("imagenet-a", (0, 0, 1, 1, 2, 2), "{}/s", "it has several images called n01498041/s.jpg"),
        ("imagenet-v2", (0, 0, 0, 1, 2, 2), "s{}", "its classes have 1 to 3 images instead of equally many"),
    ],
)
@pytest.mark.usefixtures("stocked")
def test_a_copy_of_a_relative_of_imagenet_is_checked(
    tmp_path: Path, name: str, labels: tuple[int, ...], key: str, message: str
) -> None:
    rows = [(key.format(number), world.jpeg(str(number)), label) for number, label in enumerate(labels)]
    (tmp_path / "copy.tar").write_bytes(world.webdataset_of(rows))
    (tmp_path / "classnames.txt").write_text("\n".join(known.name for known in world.IMAGENET))
    with pytest.raises(DataError, match=message):
        import_dataset(name, [tmp_path / "copy.tar"], tmp_path / "data", print)


def test_a_disk_that_is_too_small_is_noticed_first(
    stocked: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("usetta.data.download.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"this needs 0\.0 GB, and .* has 0\.0 GB left; free some space"):
        fetch_all(plan_fetch(["pets", "dtd"], tmp_path), tmp_path, print)
    assert stocked.requests == []
