"""Small copies of the paper's datasets, as they lie on disks: real names and paths, tiny images."""

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from PIL import Image

from usetta.data import NamedDataset
from usetta.data.layouts import class_folders
from usetta.data.named import DATASETS


def _tiny() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), "teal").save(file, "JPEG")
    return file.getvalue()


IMAGE = _tiny()

SPLITS: dict[str, tuple[list[tuple[str, int, str]], str, str]] = {
    "dtd": (
        [
            ("blotchy/blotchy_0027.jpg", 1, "blotchy"),
            ("banded/banded_0006.jpg", 0, "banded"),
            ("polka-dotted/polka-dotted_0121.jpg", 2, "polka-dotted"),
        ],
        "dtd/images",
        "DTD/images",
    ),
    "flowers102": (
        [
            ("image_06734.jpg", 0, "pink primrose"),
            ("image_05093.jpg", 2, "canterbury bells"),
            ("image_06628.jpg", 1, "hard-leaved pocket orchid"),
        ],
        "oxford_flowers/jpg",
        "Flower102/jpg",
    ),
    "caltech101": (
        [
            ("Faces/image_0251.jpg", 0, "face"),
            ("Leopards/image_0083.jpg", 1, "leopard"),
            ("water_lilly/image_0001.jpg", 2, "water_lilly"),
        ],
        "caltech-101/101_ObjectCategories",
        "Caltech101",
    ),
    "pets": (
        [
            ("Abyssinian_71.jpg", 0, "abyssinian"),
            ("american_bulldog_203.jpg", 1, "american_bulldog"),
            ("yorkshire_terrier_12.jpg", 2, "yorkshire_terrier"),
        ],
        "oxford_pets/images",
        "OxfordPets",
    ),
    "ucf101": (
        [
            ("Yo_Yo/v_YoYo_g07_c04.jpg", 2, "Yo_Yo"),
            ("Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg", 0, "Apply_Eye_Makeup"),
            ("Archery/v_Archery_g01_c02.jpg", 1, "Archery"),
        ],
        "ucf101/UCF-101-midframes",
        "UCF101",
    ),
    "cars": (
        [
            ("cars_test/00001.jpg", 2, "2012 Suzuki Aerio Sedan"),
            ("cars_test/00076.jpg", 0, "2000 AM General Hummer SUV"),
            ("cars_test/00104.jpg", 1, "2012 Acura RL Sedan"),
        ],
        "stanford_cars",
        "StanfordCars",
    ),
    "eurosat": (
        [
            ("AnnualCrop/AnnualCrop_1275.jpg", 0, "Annual Crop Land"),
            ("Highway/Highway_30.jpg", 1, "Highway or Road"),
            ("SeaLake/SeaLake_18.jpg", 2, "Sea or Lake"),
        ],
        "eurosat/2750",
        "eurosat",
    ),
    "sun397": (
        [
            ("a/abbey/sun_aesfrdpuprlhzzss.jpg", 0, "abbey"),
            ("a/apse/indoor/sun_aaaa.jpg", 2, "indoor apse"),
            ("a/airplane_cabin/sun_ajffbuefbuffssfk.jpg", 1, "airplane_cabin"),
        ],
        "sun397/SUN397",
        "SUN397",
    ),
    "food101": (
        [
            ("apple_pie/1005649.jpg", 0, "apple_pie"),
            ("baklava/3832160.jpg", 2, "baklava"),
            ("baby_back_ribs/1086617.jpg", 1, "baby_back_ribs"),
        ],
        "food-101/images",
        "Food101/images",
    ),
}
"""Of each dataset: test images, the folder they lie in with CoOp, and with TPT."""

UNSEEN = "class of the training images only"
LAYOUTS = ("coop", "tpt", "benchmark", "use")


def put(folder: Path, ids: Iterable[str]) -> None:
    for image in ids:
        path = folder / image
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IMAGE)


def list_file(name: str) -> str:
    source = DATASETS.get(name).source
    assert source
    assert source.split
    return source.split.file


def make_split(root: Path, name: str, layout: str = "coop", *, images: bool = True) -> Path:
    """Lay a dataset out as CoOp, TPT, the benchmark of the paper, or the paper's own code do; returns the list."""
    items, coop, tpt = SPLITS[name]
    folder = {"coop": coop, "tpt": tpt}.get(layout, f"few-shot-datasets/{coop}")
    own = root / folder.rsplit("/", folder.count("/") - (layout in ("benchmark", "use")))[0]
    file = {
        "coop": own / list_file(name),
        "tpt": root / "data" / "data_splits" / list_file(name),
        "benchmark": own / list_file(name),
        "use": root / f"sorted_{list_file(name)}",
    }[layout]
    if images:
        put(root / folder, [image for image, _, _ in items])
    file.parent.mkdir(parents=True, exist_ok=True)
    train = [("train/a.jpg", 3, UNSEEN), *((f"train-{image}", label, name) for image, label, name in items)]
    test = sorted(items) if layout == "use" else items
    file.write_text(json.dumps({"train": train, "val": [], "test": test}), encoding="utf-8")
    return file


def make_aircraft(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "variants.txt").write_text("707-320\n727-200\nA300B4\nAn-12\n", encoding="utf-8")
    (folder / "images_variant_test.txt").write_text(
        "1514522 727-200\n0747566 707-320\n1008575 An-12\n", encoding="utf-8"
    )
    put(folder / "images", ["1514522.jpg", "0747566.jpg", "1008575.jpg"])


def make_class_folders(root: Path, name: str, place: str) -> Path:
    """ImageNet or a relative: every class has an image, and the third has two."""
    home = root / place
    folders = list(class_folders(name))
    put(home, [f"{folder}/b.JPEG" for folder in folders])
    put(home, [f"{folders[2]}/a.jpg"])
    (home / "README.txt").write_text("not a class")
    return home


def small(name: str, images: int, classes: int) -> NamedDataset:
    """A named dataset with the size of its miniature."""
    return replace(DATASETS.get(name), images=images, classes=classes)
