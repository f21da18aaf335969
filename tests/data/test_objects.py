"""What people have already: other layouts, tars, tables, and objects of other libraries, which are imitated here."""

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import world
from data.miniature import SPLITS
from data.test_world import contents, digests_of, usetta
from evaluate.runs import Counting, four_blocks
from usetta.data import DataError, Dataset, import_dataset, load_dataset
from usetta.data.named import DATASETS
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import Store
from usetta.images import ImageError
from usetta.report.run_images import RunImages


@dataclass
class Image:
    """The feature of a column of images, as `datasets` has it."""

    decode: bool = True


class Rows:
    """A split as `datasets` has it, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str], decode: bool = True) -> None:
        self._rows, self._names = rows, names
        columns = dict.fromkeys(rows[0]) | {"label": SimpleNamespace(names=names)}
        self.features = columns | {"image": Image(decode)}

    def cast_column(self, column: str, feature: Image) -> "Rows":
        assert column == "image"
        return Rows(self._rows, self._names, feature.decode)

    def with_format(self, kind: str) -> "Rows":
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Any:
        yield pytest.importorskip("pyarrow").Table.from_pylist(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        assert not self.features["image"].decode  # type: ignore[union-attr]
        return self._rows[number]


def torchvision_like(kind: str, home: Path, items: list[tuple[str, int, str]]) -> Any:
    files = [home / image for image, _, _ in reversed(items)]
    labels = [label for _, label, _ in reversed(items)]
    if kind == "folder":  # ImageFolder, EuroSAT, ImageNet; StanfordCars with an underscore
        return SimpleNamespace(samples=[(str(file), label) for file, label in zip(files, labels, strict=True)])
    return SimpleNamespace(_image_files=files, _labels=labels, classes=["a", "b", "c"])  # most others


@pytest.mark.usefixtures("stocked")
def test_objects_have_the_ids_and_names_of_the_list(tmp_path: Path) -> None:
    world.lay_out(tmp_path / "coop")
    for name, (items, folder, _) in SPLITS.items():
        ours = load_dataset(name, tmp_path / "coop")
        rows = [
            {"image": {"bytes": world.jpeg(f"{name}/{image}"), "path": None}, "label": 2 - label, "file_name": image}
            for image, label, _ in reversed(items)
        ]
        forms = [
            Dataset.from_hf(Rows(rows, ["three", "two", "one"]), name),  # the list comes from GitHub
            Dataset.from_torchvision(torchvision_like("folder", tmp_path / "coop" / folder, items), name),
            Dataset.from_torchvision(torchvision_like("files", tmp_path / "coop" / folder, items), name),
        ]
        for form in forms:
            assert (form.fingerprint, form.ids, form.family) == (ours.fingerprint, ours.ids, "fine-grained")
            assert digests_of(pickle.loads(pickle.dumps(form))) == digests_of(ours)
    home = tmp_path / "coop/imagenetv2/imagenetv2-matched-frequency-format-val"
    v2 = SimpleNamespace(samples=[(str(path), 7) for path in home.rglob("*.JPEG")])
    assert Dataset.from_torchvision(v2, "V").ids == load_dataset("V", tmp_path / "coop").ids
    root = tmp_path / "coop/caltech-101"
    caltech = SimpleNamespace(
        root=root, categories=["Faces", "Leopards", "water_lilly"], index=[251, 83, 1], y=[0, 1, 2], classes=()
    )
    assert Dataset.from_torchvision(caltech, "caltech101").fingerprint == load_dataset("caltech101", root).fingerprint
    home = tmp_path / "coop/fgvc_aircraft/images"
    planes = torchvision_like("files", home, [(image, label, "") for image, label in world.AIRCRAFT.items()])
    planes.classes = list(world.VARIANTS)
    ours = load_dataset("aircraft", tmp_path / "coop")
    assert Dataset.from_torchvision(planes, "aircraft").fingerprint == ours.fingerprint


def test_an_object_of_ones_own_keeps_its_names(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": world.jpeg(str(n)), "path": f"{n % 2}.jpg"}, "label": n % 2} for n in range(3)]
    zoo = Dataset.from_hf(Rows(rows, ["red_fox", "emu"]), "zoo")
    assert (zoo.ids, zoo.labels, zoo.classes) == (("000000", "000001", "000002"), (0, 1, 0), ("red fox", "emu"))
    assert (zoo.name, zoo.family) == ("zoo", "other")
    with pytest.raises(DataError, match="does not say what its classes are called"):
        Dataset.from_hf(Rows(rows, []), "zoo")
    with pytest.raises(TypeError, match="expected a split of a Hugging Face dataset, not a dict"):
        Dataset.from_hf({"test": rows}, "zoo")
    with pytest.raises(TypeError, match="does not say which files its images are"):
        Dataset.from_torchvision(SimpleNamespace(data=[]), "zoo")


def test_a_row_without_an_image_fails_alone() -> None:
    images = [{"bytes": None, "path": "a.jpg"}, {"bytes": None, "path": None}, None]
    rows = [{"image": image, "label": 0} for image in images]
    zoo = Dataset.from_hf(Rows(rows, ["emu"]), "zoo")
    first, second, third = (zoo.source(image) for image in zoo.ids)
    assert callable(first)
    assert first() == "a.jpg"
    for source in (second, third):
        assert callable(source)
        with pytest.raises(ImageError, match="the dataset holds neither its bytes nor its path"):
            source()


@pytest.mark.usefixtures("stocked")
def test_objects_that_cannot_be_the_dataset_are_refused(tmp_path: Path) -> None:
    table = Rows([{"label": 0, "text": "emu"}], ["emu"])
    del table.features["image"]
    with pytest.raises(DataError, match="the dataset has no column of images; its columns are label, text"):
        Dataset.from_hf(table, "zoo")
    items = [(image, label, "") for image, label in world.AIRCRAFT.items()]
    planes = torchvision_like("files", tmp_path, items[:2])
    with pytest.raises(DataError) as caught:  # which has no list of its images to compare with
        Dataset.from_torchvision(planes, "aircraft")
    assert str(caught.value) == "aircraft has 3 images of 3 classes, this has 2 of 3; use its test split"


@pytest.mark.usefixtures("stocked")
def test_imported_files_may_be_unpacked(tmp_path: Path) -> None:
    world.lay_out(tmp_path / "coop")
    items = SPLITS["pets"][0]
    tar = tmp_path / "pets.tar"
    tar.write_bytes(world.webdataset_of([(image[:-4], world.jpeg(f"pets/{image}"), n) for image, n, _ in items]))
    report = import_dataset("pets", [tar], tmp_path / "data", print, unpacked=True)
    assert (report.state, report.where) == (
        "complete",
        "oxford_pets/images, listed in oxford_pets/split_zhou_OxfordPets.json",
    )
    tar.unlink()
    assert contents("pets", tmp_path / "data") == contents("pets", tmp_path / "coop")
    assert not list((tmp_path / "data").rglob("packed"))


@pytest.mark.usefixtures("stocked")
def test_what_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/nowhere does not exist$"):
        import_dataset("pets", [tmp_path / "nowhere"], tmp_path / "data", print)
    pets = DATASETS.get("pets")
    (tmp_path / "a.tar").write_bytes(world.webdataset_of([("a", b"x", 0)]))
    for source, message in (
        (None, "pets has no folder of its own, so it cannot be imported"),
        (replace(pets.source, split=None), "pets has no list to compare with; keep its own files"),  # type: ignore[type-var]
    ):
        monkeypatch.setattr("usetta.data.fetching.DATASETS", {"pets": replace(pets, source=source)})
        with pytest.raises(DataError) as caught:
            import_dataset("pets", [tmp_path / "a.tar"], tmp_path / "data", print)
        assert str(caught.value) == message


@pytest.mark.usefixtures("stocked")
def test_other_layouts_are_imported_where_they_are(tmp_path: Path) -> None:
    world.lay_out(tmp_path / "coop")
    anywhere = tmp_path / "anywhere"
    for image, content in world.images_of("flowers102").items():
        (anywhere / "deep").mkdir(parents=True, exist_ok=True)
        (anywhere / "deep" / image).write_bytes(content)
    done = usetta("data", "import", "flowers102", anywhere, "--data", tmp_path / "data")
    assert (done.exit_code, done.stdout) == (0, "flowers102: complete in oxford_flowers/packed, imported by name\n")
    assert contents("flowers102", tmp_path / "data") == contents("flowers102", tmp_path / "coop")
    again = usetta("data", "import", "flowers102", anywhere, "--data", tmp_path / "data")
    assert (again.exit_code, "is already in" in again.stderr) == (1, True)
    (anywhere / "deep/image_06734.jpg").unlink()
    assert usetta("data", "check", tmp_path / "data", "--only", "flowers102").exit_code == 1
    (anywhere / "deep/image_05093.jpg").unlink()
    with pytest.raises(DataError, match=r"2 of 3 listed images are not in it, the first is image_06734\.jpg"):
        import_dataset("flowers102", [anywhere], tmp_path / "other", print)


@pytest.mark.usefixtures("stocked")
def test_features_of_one_form_serve_all_others(tmp_path: Path) -> None:
    world.lay_out(tmp_path / "coop")
    items = SPLITS["pets"][0]
    tar = tmp_path / "pets.tar"
    tar.write_bytes(world.webdataset_of([(image[:-4], world.jpeg(f"pets/{image}"), n) for image, n, _ in items]))
    import_dataset("pets", [tar], tmp_path / "data", print)
    model, cache = Counting(four_blocks()), tmp_path / "features"
    settings = EvalSettings(views=4)
    home = tmp_path / "coop/oxford_pets/images"
    forms = [
        load_dataset("pets", tmp_path / "coop"),
        load_dataset("pets", tmp_path / "data"),
        Dataset.from_torchvision(torchvision_like("folder", home, items), "pets"),
    ]
    for number, dataset in enumerate(forms):
        done = evaluate(model, [dataset], ["clip", "se"], tmp_path / f"run{number}", settings, cache=cache)
        assert (done.images, done.encoded, done.failed) == (3, 0 if number else 3, 0)
    with Store(tmp_path / "run1") as store:  # a report opens the images again, in the tar
        assert RunImages(store).open("pets", items[0][0], 0).image.size == (32, 24)


@pytest.mark.parametrize("folder", ["oxford_pets", "caltech101", "flowers102", "dtd10"])
def test_real_images_have_the_same_keys_in_every_form(
    real_images: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in CoOp's layout, tars, tables and an object of torchvision: the same ids, the same bytes."""
    name = {"oxford_pets": "pets", "dtd10": "dtd"}.get(folder, folder)
    manifest = json.loads((real_images / folder / "manifest.json").read_text())["items"]
    items = [(original.rsplit("/", original.startswith("test/"))[-1], *row) for *row, original in manifest]
    content = json.dumps({"test": [(image, label, text) for image, _, label, text in items]}).encode()
    named = DATASETS.get(name)
    assert named.source
    assert named.source.split
    bytes_of = {image: (real_images / folder / file).read_bytes() for image, file, _, _ in items}
    roots = [tmp_path / form for form in ("coop", "tar", "table")]
    for root in roots:
        (root / named.source.folder).mkdir(parents=True)
        (root / named.source.folder / named.source.split.file).write_bytes(content)
    home = tmp_path / "coop" / named.source.images
    for image, file, _, _ in items:
        (home / image).parent.mkdir(parents=True, exist_ok=True)
        (home / image).symlink_to(real_images / folder / file)
    shuffled = items[::-1]
    for number in range(2):
        rows = [(image.rpartition(".")[0], bytes_of[image], label) for image, _, label, _ in shuffled[number::2]]
        (tmp_path / f"{number}.tar").write_bytes(world.webdataset_of(rows))
    table = [{"image": {"bytes": bytes_of[image], "path": image}, "label": n} for image, _, n, _ in shuffled]
    (tmp_path / "0.parquet").write_bytes(world.table_of(table))
    import_dataset(name, [tmp_path / "0.tar", tmp_path / "1.tar"], roots[1], print)
    import_dataset(name, [tmp_path / "0.parquet"], roots[2], print)
    ours = load_dataset(name, roots[0])
    like = torchvision_like("files", home, [(image, label, "") for image, _, label, _ in items])
    for form in (
        *(load_dataset(name, root) for root in roots[1:]),
        Dataset.from_torchvision(like, name, root=roots[0]),
    ):
        assert (form.fingerprint, form.ids) == (ours.fingerprint, ours.ids)
        assert digests_of(form) == digests_of(ours)
