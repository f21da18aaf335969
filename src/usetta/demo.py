"""`usetta demo`: a dozen real images, zero-shot beside the other methods, and pages that show both.

The images come with packages of the package index, as the embedded model does, so the demonstration runs where
no model hub can be reached. The ones of foolbox are ImageNet images with the class in the file name.

They are a dataset like any other: a run on them makes the report, and the page that explains every answer looks at
the very same views, so both say the same and no image goes through the model twice.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from usetta import methods as known_methods
from usetta.classifier import TextHead
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import FILE, Store
from usetta.feature_cache import FeatureCache
from usetta.images import ImageError
from usetta.models import Model
from usetta.models.package_files import PackageFile, cache_dir, fetch
from usetta.pipeline import ImageRequest, Pipeline
from usetta.prediction import Explanation
from usetta.views import ViewRecipe
from usetta.views.show import as_bytes

_FOOLBOX = "foolbox==3.3.4"
_SKIMAGE = "scikit-image==0.26.0"


@dataclass(frozen=True)
class DemoImage:
    """An image of a package and what it shows."""

    shows: str
    file: PackageFile

    @property
    def name(self) -> str:
        """File name, by what it shows."""
        return f"{self.shows.replace(' ', '-')}{Path(self.file.member).suffix}"


def _foolbox(shows: str, file: str, sha256: str) -> DemoImage:
    return DemoImage(shows, PackageFile(_FOOLBOX, f"foolbox/data/{file}", sha256))


def _skimage(shows: str, file: str, sha256: str) -> DemoImage:
    return DemoImage(shows, PackageFile(_SKIMAGE, f"skimage/data/{file}", sha256))


DEMO_IMAGES = (
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

CLASSES = (*(image.shows for image in DEMO_IMAGES), *DISTRACTORS)


@dataclass(frozen=True)
class DemoAnswers:
    """What each method said about an image."""

    image: DemoImage
    path: Path
    by_method: dict[str, Explanation]

    def is_right(self, method: str) -> bool:
        """Whether that method named what the image shows."""
        return self.by_method[method].prediction.label == self.image.shows


def demo_dataset(log: Callable[[str], object]) -> Dataset:
    """The images, fetched unless they are in the cache already."""
    folder = cache_dir() / "demo"
    for image in DEMO_IMAGES:
        fetch(image.file, folder / image.name, log)
    return Dataset(
        name="demo",
        title="Demo",
        family="other",
        classes=CLASSES,
        ids=tuple(image.name for image in DEMO_IMAGES),
        labels=tuple(CLASSES.index(image.shows) for image in DEMO_IMAGES),
        root=folder,
        layout=str(folder),
    )


def measure(model: Model, dataset: Dataset, methods: Sequence[str], views: int, folder: Path) -> None:
    """Run the methods on the images, in place of the run of an earlier demonstration in `folder`."""
    if (folder / FILE).exists():
        with Store(folder) as store:
            others = store.facts("dataset").keys() - {dataset.name}
        if others:
            raise ValueError(
                f"{folder} contains a run on {', '.join(sorted(others))}; choose another folder with --out"
            )
        (folder / FILE).unlink()
    evaluate(model, [dataset], methods, folder, EvalSettings(views=views), cache=_features())


def answers(model: Model, dataset: Dataset, methods: Sequence[str], views: int) -> Iterator[DemoAnswers]:
    """Every method on every image, with its reasons, from the features of the run."""
    head = TextHead(dataset.classes, model)
    recipes = [known_methods.get(method) for method in methods]
    for recipe in recipes:
        head.check(recipe, views)
    requests = (
        ImageRequest(
            str(item.path),
            ViewRecipe(views=views, size=model.image_size),
            id=item.id,
            hidden=any(recipe.needs_hidden for recipe in recipes),
            keep_pixels=True,
            for_benchmark=True,
        )
        for item in dataset
    )
    with FeatureCache(_features()) as cache:
        episodes = Pipeline(model, cache=cache).stream(requests)
        for image, item, episode in zip(DEMO_IMAGES, dataset, episodes, strict=True):
            if isinstance(episode, ImageError):
                raise episode
            assert episode.pixels is not None
            shown = as_bytes(episode.pixels)
            predictions = [head.predict(recipe, [episode], [str(item.path)])[0] for recipe in recipes]
            explanations = [Explanation(p, recipe.name, shown) for p, recipe in zip(predictions, recipes, strict=True)]
            yield DemoAnswers(image, item.path, dict(zip(methods, explanations, strict=True)))


def _features() -> Path:
    """Where features of the demonstration are kept, so that it is quick the second time."""
    return cache_dir() / "demo" / "features"


def write_pages(answers: list[DemoAnswers], folder: Path, model: Model, views: int) -> Path:
    """Write `index.html`, its images and `answers.json` into `folder`, and `report.html` of the run in `run`."""
    from usetta.report.html import in_plain_words, render
    from usetta.report.run import write_report

    for answer in answers:
        (folder / answer.image.name).write_bytes(answer.path.read_bytes())
        list(answer.by_method.values())[-1].save(folder / f"{answer.path.stem}-views.jpg", shown=16)
    rows = [
        {
            "shows": answer.image.shows,
            "file": answer.image.name,
            "source": f"{answer.image.file.requirement}: {answer.image.file.member}",
            "views": f"{answer.path.stem}-views.jpg",
            "methods": {
                name: explanation.prediction.to_dict() | {"right": answer.is_right(name)}
                for name, explanation in answer.by_method.items()
            },
        }
        for answer in answers
    ]
    (folder / "answers.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    about = {name: in_plain_words(name) for name in answers[0].by_method}
    right = {name: sum(answer.is_right(name) for answer in answers) for name in about}
    page = render(
        "demo.html.j2", rows=rows, about=about, right=right, model_name=model.name, views=views, classes=CLASSES
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    with Store(folder / "run", create=False) as store:
        write_report(store, folder / "report.html", baseline=next(iter(about)))
    return folder / "index.html"
