"""The fifteen datasets of the paper: how many images and classes, and under which names they lie on disks.

Two layouts are common. CoOp's has folders such as `oxford_pets/images` with the list of the split beside them; TPT's
has `OxfordPets` with the images directly inside and all lists in one place. The benchmark that the paper uses puts
CoOp's folders into `few-shot-datasets`. All are understood, and spelling does not matter: `caltech-101`, `Caltech101`.

Only the test split is used; of ImageNet, the validation images.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from usetta.data.dataset import Family, UnknownDatasetError


@dataclass(frozen=True)
class Benchmark:
    """One of the fifteen."""

    name: str
    title: str
    family: Family
    images: int
    classes: int
    kind: Literal["split", "variants", "class folders"]
    """Where labels come from: a `split_zhou_*.json`, Aircraft's text files, or folders named by class."""
    folders: tuple[str, ...]
    """Names of the set's own folder, CoOp's first; case, `-` and `_` do not count."""
    inner: tuple[str, ...]
    """Where in its folder the images may lie, CoOp's place first."""
    split: str = ""
    """Name of the list, if it has one."""
    aliases: tuple[str, ...] = ()


def _imagenet(
    name: str, title: str, images: int, classes: int, folders: tuple[str, ...], inner: tuple[str, ...], letter: str
) -> Benchmark:
    return Benchmark(name, title, "imagenet", images, classes, "class folders", folders, inner, aliases=(letter,))


def _split(
    name: str,
    title: str,
    images: int,
    classes: int,
    folders: tuple[str, ...],
    inner: tuple[str, ...],
    split: str,
    *aliases: str,
) -> Benchmark:
    file = f"split_zhou_{split}.json"
    return Benchmark(name, title, "fine-grained", images, classes, "split", folders, inner, file, aliases)


_V2 = "imagenetv2-matched-frequency-format-val"

BENCHMARKS = (
    _imagenet("imagenet", "ImageNet", 50_000, 1000, ("imagenet", "ilsvrc2012"), ("images/val", "val", ""), "I"),
    _imagenet("imagenet-a", "ImageNet-A", 7_500, 200, ("imagenet-adversarial", "imagenet-a"), ("imagenet-a", ""), "A"),
    _imagenet("imagenet-v2", "ImageNet-V2", 10_000, 1000, ("imagenetv2", _V2), (_V2, ""), "V"),
    _imagenet("imagenet-r", "ImageNet-R", 30_000, 200, ("imagenet-rendition", "imagenet-r"), ("imagenet-r", ""), "R"),
    _imagenet("imagenet-sketch", "ImageNet-Sketch", 50_889, 1000, ("imagenet-sketch",), ("images", "sketch", ""), "K"),
    _split("dtd", "DTD", 1_692, 47, ("dtd",), ("images", "dtd/images"), "DescribableTextures", "describable_textures"),
    _split(
        "flowers102", "Flowers102", 2_463, 102, ("oxford_flowers", "flower102", "flowers102"), ("jpg",), "OxfordFlowers"
    ),
    _split("caltech101", "Caltech101", 2_465, 100, ("caltech-101",), ("101_ObjectCategories", ""), "Caltech101"),
    Benchmark(
        "aircraft",
        "Aircraft",
        "fine-grained",
        3_333,
        100,
        "variants",
        ("fgvc_aircraft", "fgvc-aircraft-2013b", "aircraft"),
        ("images", "data/images", "fgvc-aircraft-2013b/data/images"),
    ),
    _split("pets", "Pets", 3_669, 37, ("oxford_pets", "oxford-iiit-pet", "pets"), ("images", ""), "OxfordPets"),
    _split("ucf101", "UCF101", 3_783, 101, ("ucf101",), ("UCF-101-midframes", ""), "UCF101"),
    _split("cars", "Cars", 8_041, 196, ("stanford_cars", "cars"), ("",), "StanfordCars"),
    _split("eurosat", "EuroSAT", 8_100, 10, ("eurosat",), ("2750", "eurosat/2750", ""), "EuroSAT"),
    _split("sun397", "SUN397", 19_850, 397, ("sun397",), ("SUN397", ""), "SUN397"),
    _split("food101", "Food101", 30_300, 101, ("food-101",), ("images",), "Food101"),
)
"""In the order of the paper's tables."""


def plain(name: str) -> str:
    """A name without what people write differently: case and punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


_BY_NAME = {
    plain(known): benchmark
    for benchmark in BENCHMARKS
    for known in (benchmark.name, *benchmark.folders, *benchmark.aliases)
}


def list_datasets() -> tuple[Benchmark, ...]:
    """The datasets that are known by name, in the order of the paper's tables."""
    return BENCHMARKS


def find_benchmark(name: str) -> Benchmark | None:
    """The dataset of that name or alias, if there is one."""
    return _BY_NAME.get(plain(name))


def get_benchmark(name: str) -> Benchmark:
    """The dataset of that name or alias; `UnknownDatasetError` suggests the nearest."""
    if found := find_benchmark(name):
        return found
    near = difflib.get_close_matches(plain(name), list(_BY_NAME), n=1)
    hint = f"did you mean '{_BY_NAME[near[0]].name}'?" if near else f"known are {', '.join(b.name for b in BENCHMARKS)}"
    raise UnknownDatasetError(f"unknown dataset '{name}'", hint)
