"""`usetta demo`: a dozen real photographs, plain zero-shot beside the other methods, and a report with pictures.

The photographs come with packages of the package index, as the embedded model does, so the demonstration runs where
no model hub can be reached. The ones of foolbox are ImageNet pictures with the class in the file name.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from usetta import methods as known_methods
from usetta.classifier import Classifier, Explanation
from usetta.models import Model
from usetta.models.wheels import WheelFile, cache_dir, fetch

_FOOLBOX = "foolbox==3.3.4"
_SKIMAGE = "scikit-image==0.26.0"


@dataclass(frozen=True)
class Photograph:
    """A picture of a package and what it shows."""

    shows: str
    file: WheelFile

    @property
    def name(self) -> str:
        """File name, by what it shows."""
        return f"{self.shows.replace(' ', '-')}{Path(self.file.member).suffix}"


def _foolbox(shows: str, file: str, sha256: str) -> Photograph:
    return Photograph(shows, WheelFile(_FOOLBOX, f"foolbox/data/{file}", sha256))


def _skimage(shows: str, file: str, sha256: str) -> Photograph:
    return Photograph(shows, WheelFile(_SKIMAGE, f"skimage/data/{file}", sha256))


PHOTOGRAPHS = (
    _skimage("tabby cat", "chelsea.png", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"),
    _skimage("espresso", "coffee.png", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"),
    _foolbox("bullmastiff", "imagenet_00_243.jpg", "28b7b933c8028c6e20bf74a86a709eda42ce99f14c8742cb657cb386f08a4c9d"),
    _foolbox(
        "folding chair", "imagenet_01_559.jpg", "5f03b0c74dff01b5b4195d0beabcae2a625a406e6917957ab9c455b5b7dea6d6"
    ),
    _foolbox(
        "horse chestnut", "imagenet_03_990.jpg", "c7f0b2f1e9ee39d8f900759e8983afa2e4a2d7de090060e8bb947f6e90cace5f"
    ),
    _foolbox(
        "thatched roof", "imagenet_05_853.jpg", "8a449436c61da867528b1f4efaf8ae832ab9c9201705eae0d3af1353fbdac131"
    ),
    _foolbox("jeep", "imagenet_06_609.jpg", "fb061102a4e58b3ed942bb2a4f9542e1e1acdc8f225ef95498e93889290e192f"),
    _foolbox("yurt", "imagenet_08_915.jpg", "c6a3411a3987799f0de45adc142f00ca412c3e14073c635e2adfae1f3913180c"),
    _foolbox("cannon", "imagenet_13_471.jpg", "52ed0e738b90d27afcabc3e92c81ae637f160c2d9f75b93a65211005ab5dcd81"),
    _foolbox("spoonbill", "imagenet_14_129.jpg", "ad9371d813bf24b0365ee2f78f28c08718ee7c5975f060caa16c3f264e828139"),
    _foolbox("goose", "imagenet_15_99.jpg", "4b588649cd835d4c65521727ebee03d9621baff1f54d3e8a53a26b53d983ec2e"),
    _foolbox("dung beetle", "imagenet_19_305.jpg", "e1f58f00e2e47ce930d7ecab0e46a78316054f68c10d0742e87c1cc092324556"),
)

DISTRACTORS = (
    "tiger cat", "Siamese cat", "boxer dog", "Rhodesian ridgeback", "golden retriever", "red fox",
    "coffee mug", "hot chocolate", "teapot", "red wine",
    "rocking chair", "park bench", "deck chair", "acorn", "fig", "artichoke",
    "church", "barn", "stone wall", "greenhouse", "tent", "boathouse",
    "pickup truck", "minivan", "sports car", "tractor", "tank", "oxcart", "wheelbarrow",
    "white stork", "flamingo", "crane", "pelican", "duck", "black swan",
    "ground beetle", "leaf beetle", "scorpion", "cricket", "ant",
)  # fmt: skip

IN_PLAIN_WORDS = {
    "clip": "looks at the photograph once and picks the class whose text fits best.",
    "se": "also looks at crops, keeps the few that the model is most certain about, and mixes what they say with what "
    "the photograph says. The photograph counts more where it is more certain than its crops.",
    "tpt": "tunes the prompt for this one photograph until the most certain crops agree on a class, then looks at the "
    "photograph once more with the tuned prompt.",
    "use": "leaves the prompt alone where the photograph and its most certain crops already agree (skipped). Elsewhere "
    "it tunes the prompt towards the mixture that se would give, then mixes as se does.",
}
"""What methods do, for somebody who has not read the paper; the others go by the description of their recipe."""

CLASSES = (*(photograph.shows for photograph in PHOTOGRAPHS), *DISTRACTORS)


@dataclass(frozen=True)
class Answers:
    """What each method said about a photograph."""

    photograph: Photograph
    path: Path
    by_method: dict[str, Explanation]

    def is_right(self, method: str) -> bool:
        """Whether that method named what the photograph shows."""
        return self.by_method[method].prediction.label == self.photograph.shows


def photographs(say: Callable[[str], object]) -> list[Path]:
    """The photographs, fetched unless they are in the cache already."""
    folder = cache_dir() / "demo"
    return [fetch(photograph.file, folder / photograph.name, say) for photograph in PHOTOGRAPHS]


def answers(model: Model, paths: Iterable[Path], methods: list[str], views: int) -> Iterator[Answers]:
    """Every method on every photograph, all methods from one encoding of its views."""
    classifier = Classifier(CLASSES, model, views=views)
    for photograph, path in zip(PHOTOGRAPHS, paths, strict=True):
        explained = classifier.compare(path, methods)
        yield Answers(photograph, path, dict(zip(methods, explained, strict=True)))


def write_report(found: list[Answers], folder: Path, model: Model, views: int) -> Path:
    """Write `index.html`, its pictures and `answers.json` into `folder`."""
    from usetta.report.demo import render

    folder.mkdir(parents=True, exist_ok=True)
    for each in found:
        (folder / each.photograph.name).write_bytes(each.path.read_bytes())
        list(each.by_method.values())[-1].save(folder / f"{each.path.stem}-views.png", shown=16)
    rows = [
        {
            "shows": each.photograph.shows,
            "file": each.photograph.name,
            "source": f"{each.photograph.file.requirement}: {each.photograph.file.member}",
            "views": f"{each.path.stem}-views.png",
            "methods": {
                name: explanation.prediction.as_dict() | {"right": each.is_right(name)}
                for name, explanation in each.by_method.items()
            },
        }
        for each in found
    ]
    (folder / "answers.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    about = {name: IN_PLAIN_WORDS.get(name, known_methods.get(name).description) for name in found[0].by_method}
    page = folder / "index.html"
    page.write_text(render(rows, about=about, model_name=model.name, views=views, classes=CLASSES), encoding="utf-8")
    return page
