"""Names, aliases, roots, and what `check` says."""

import json
import shutil
from pathlib import Path

import pytest

from data.miniature import LAYOUTS, SPLITS, make_aircraft, make_class_folders, make_split, put, small
from usetta.data import DataError, UnknownDatasetError, check, list_datasets, load_dataset, load_datasets
from usetta.data.benchmark import BENCHMARKS
from usetta.data.load import check_one
from usetta.data.named import DATASETS


def test_the_fifteen_of_the_paper() -> None:
    sizes = {
        "imagenet": (50_000, 1000),
        "imagenet-a": (7_500, 200),
        "imagenet-v2": (10_000, 1000),
        "imagenet-r": (30_000, 200),
        "imagenet-sketch": (50_889, 1000),
        "dtd": (1_692, 47),
        "flowers102": (2_463, 102),
        "caltech101": (2_465, 100),
        "aircraft": (3_333, 100),
        "pets": (3_669, 37),
        "ucf101": (3_783, 101),
        "cars": (8_041, 196),
        "eurosat": (8_100, 10),
        "sun397": (19_850, 397),
        "food101": (30_300, 101),
    }
    assert [(dataset.name, (dataset.images, dataset.classes)) for dataset in list_datasets()] == list(sizes.items())
    assert [dataset.family for dataset in BENCHMARKS] == ["imagenet"] * 5 + ["fine-grained"] * 10


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("I", "imagenet"), ("A", "imagenet-a"), ("V", "imagenet-v2"), ("R", "imagenet-r"), ("K", "imagenet-sketch")),
        *(("oxford_pets", "pets"), ("Flower102", "flowers102"), ("oxford_flowers", "flowers102"), ("DTD", "dtd")),
        *(("ImageNetV2", "imagenet-v2"), ("stanford_cars", "cars"), ("fgvc_aircraft", "aircraft")),
        *(("caltech-101", "caltech101"), ("food-101", "food101"), ("SUN397", "sun397"), ("EuroSAT", "eurosat")),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert DATASETS.get(alias).name == name


@pytest.mark.parametrize(("slip", "meant"), [("pet", "pets"), ("imagnet-a", "imagenet-a"), ("flowers", "flowers102")])
def test_a_slip_gets_a_suggestion(tmp_path: Path, slip: str, meant: str) -> None:
    for root in (tmp_path, None):
        with pytest.raises(UnknownDatasetError, match=f"unknown dataset '{slip}'; did you mean '{meant}'"):
            load_dataset(slip, root)
    assert issubclass(UnknownDatasetError, ValueError)


def test_a_name_like_nothing_gets_the_list(tmp_path: Path) -> None:
    with pytest.raises(UnknownDatasetError, match="known: imagenet, imagenet-a, .*food101"):
        load_dataset("zzzzzz", tmp_path)


def test_the_root_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_split(tmp_path, "pets")
    monkeypatch.delenv("USETTA_DATA", raising=False)
    with pytest.raises(
        DataError,
        match=r"no folder given for the dataset pets; pass .* \(--data\), or set USETTA_DATA",
    ):
        load_dataset("pets")
    monkeypatch.setenv("USETTA_DATA", str(tmp_path))
    assert len(load_dataset("pets")) == 3


def test_a_name_is_not_a_path_unless_it_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ["pets/cat/a.jpg", "zoo/emu/b.jpg"])
    monkeypatch.delenv("USETTA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no folder given for the dataset pets"):
        load_dataset("pets")
    assert load_dataset("./pets").classes == ("cat",)
    assert load_dataset("zoo").classes == ("emu",)


@pytest.mark.parametrize("missing", ["/no/such/folder", "no-such-list.csv"])
def test_a_path_that_does_not_exist(missing: str) -> None:
    with pytest.raises(DataError, match=f"{missing} does not exist"):
        load_dataset(missing)
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        load_dataset("pets", "/nowhere")


def test_sets_with_names_of_their_own_take_no_others(tmp_path: Path) -> None:
    put(tmp_path, ["emu/b.jpg"])
    with pytest.raises(ValueError, match="pets has its own class names"):
        load_dataset("pets", tmp_path, classes=["cat"])
    with pytest.raises(ValueError, match="are those of its folders"):
        load_dataset(tmp_path, classes=["cat"])


def test_check_of_an_empty_folder(tmp_path: Path) -> None:
    reports = check(tmp_path)
    assert [report.name for report in reports] == [dataset.name for dataset in BENCHMARKS]
    assert {report.state for report in reports} == {"absent"}
    todo = {report.name: report.todo for report in reports}
    assert todo["dtd"] == f"Run `usetta data fetch dtd {tmp_path}`."
    assert todo["ucf101"] == f"Run `usetta data fetch ucf101 {tmp_path}` for the steps to take by hand."
    with pytest.raises(DataError, match="does not exist"):
        check(tmp_path / "no")


def test_check_of_chosen_sets(tmp_path: Path) -> None:
    assert [report.name for report in check(tmp_path, ["K", "oxford_pets"])] == ["imagenet-sketch", "pets"]
    with pytest.raises(UnknownDatasetError, match="did you mean 'dtd'"):
        check(tmp_path, ["dt"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPLITS)
def test_check_of_a_complete_set(tmp_path: Path, name: str, layout: str) -> None:
    make_split(tmp_path, name, layout)
    report = check_one(small(name, 3, 4), tmp_path)
    assert (report.state, report.images, report.expected, report.missing) == ("complete", 3, 3, 0)
    assert (report.problem, report.todo) == ("", "Nothing to do.")
    assert report.where == load_dataset(name, tmp_path).layout


def test_check_counts_against_the_paper(tmp_path: Path) -> None:
    make_split(tmp_path, "pets")
    report = check(tmp_path, ["pets"])[0]
    assert (report.state, report.images, report.expected) == ("incomplete", 3, 3669)
    assert report.problem == "3 images instead of 3,669; 4 classes instead of 37"


def test_check_counts_missing_images(tmp_path: Path) -> None:
    make_split(tmp_path, "sun397")
    shutil.rmtree(tmp_path / "sun397/SUN397/a/apse")
    report = check_one(small("sun397", 3, 4), tmp_path)
    assert (report.state, report.images, report.missing) == ("incomplete", 2, 1)
    assert report.problem == "1 listed images are missing, the first is a/apse/indoor/sun_aaaa.jpg"
    assert report.todo == (
        f"Unpack the archive again, or move sun397/SUN397 away and run `usetta data fetch sun397 {tmp_path}`."
    )


@pytest.mark.parametrize("name", SPLITS)
def test_check_says_where_the_list_is(tmp_path: Path, name: str) -> None:
    make_split(tmp_path, name).unlink()
    report = check(tmp_path, [name])[0]
    source = DATASETS.get(name).source
    assert source is not None
    assert report.state == "no list"
    assert report.where == SPLITS[name][1]
    assert source.split
    assert report.todo == f"Run `usetta data fetch {name} {tmp_path}`, which downloads {source.split.file}."


def test_a_list_alone_is_not_a_dataset(tmp_path: Path) -> None:
    make_split(tmp_path, "pets", images=False)
    report = check(tmp_path, ["pets"])[0]
    assert (report.state, report.todo) == ("absent", f"Run `usetta data fetch pets {tmp_path}`.")


def test_check_of_something_malformed(tmp_path: Path) -> None:
    make_split(tmp_path, "pets").write_text("{")
    put(tmp_path / "imagenet/images/val", ["ILSVRC2012_val_00000001.JPEG"])
    make_aircraft(tmp_path / "fgvc_aircraft")
    (tmp_path / "fgvc_aircraft" / "variants.txt").unlink()
    reports = check(tmp_path, ["pets", "imagenet", "aircraft"])
    assert [report.state for report in reports] == ["broken"] * 3
    assert reports[0].todo == "Download it again."
    assert reports[1].todo == "Sort them into one folder per class (wnid)."
    assert reports[2].todo == "Move its folder away and fetch the dataset again."
    (tmp_path / "imagenet-a" / "n01498041").mkdir(parents=True)
    empty = check(tmp_path, ["imagenet-a"])[0]
    assert (empty.state, empty.problem) == ("broken", "imagenet-a has no images")
    assert empty.todo == "Move its folder away and fetch it again."


def test_check_of_class_folders(tmp_path: Path) -> None:
    home = make_class_folders(tmp_path, "imagenet-a", "imagenet-adversarial/imagenet-a")
    whole = check_one(small("imagenet-a", 201, 200), tmp_path)
    assert (whole.state, whole.images, whole.where) == ("complete", 201, "imagenet-adversarial/imagenet-a")
    shutil.rmtree(home / "n01498041")
    part = check_one(small("imagenet-a", 201, 200), tmp_path)
    assert (part.state, part.images, part.missing) == ("incomplete", 200, 1)
    assert part.problem == "1 classes have no images, the first is n01498041; 200 images instead of 201"


def test_a_folder_of_datasets_is_not_one_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_split(tmp_path, "pets")
    put(tmp_path, ["birds/emu/a.jpg", "birds/owl/b.jpg", "cars/1.jpg", "notes/read.me"])
    for name in ("birds", "cars"):
        images = [path.relative_to(tmp_path / name).as_posix() for path in sorted((tmp_path / name).rglob("*.jpg"))]
        items = [{"path": image, "label": f"class {number}"} for number, image in enumerate(images)]
        (tmp_path / name / "manifest.json").write_text(json.dumps(items))
    monkeypatch.setitem(DATASETS._values, "pets", small("pets", 3, 4))
    datasets = load_datasets([], tmp_path)
    assert [(dataset.name, len(dataset)) for dataset in datasets] == [("pets", 3), ("birds", 2), ("cars", 1)]
    assert [dataset.name for dataset in load_datasets([], tmp_path / "birds")] == ["birds"]
