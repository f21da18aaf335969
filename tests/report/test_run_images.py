"""Which images changed, how many, in which order; and images of a run opened again with their views."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make_image
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import ResultRow, Store
from usetta.images import ImageError
from usetta.methods.select import entropy
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.report.run_images import AnswerChanges, MethodAnswer, RunImages, find_changes
from usetta.views import ViewRecipe, make_views

CLASSES = ("tabby cat", "red fox", "church")


def row(image: str, method: str, prediction: int, true: float, *, seed: int = 0, dataset: str = "pets") -> ResultRow:
    """An answer; the true class is 1."""
    return ResultRow(dataset, image, seed, method, 1, prediction, 0.9, true, 0, 0.5, None, 1.0, None, None, 64, 0.1)


def changes(folder: Path, rows: list[ResultRow], limit: int = 9) -> AnswerChanges:
    with Store(folder) as store:
        store.add(rows)
        return find_changes(store, "clip", "use", limit)


def pair(image: str, before: tuple[int, float], after: tuple[int, float], **where: object) -> list[ResultRow]:
    return [row(image, "clip", *before, **where), row(image, "use", *after, **where)]  # type: ignore[arg-type]


def test_the_most_changed_come_first_and_all_are_counted(tmp_path: Path) -> None:
    result = changes(
        tmp_path,
        [
            *pair("stays-right", (1, 0.2), (1, 0.9)),
            *pair("stays-wrong", (2, 0.2), (3, 0.1)),
            *pair("little", (2, 0.40), (1, 0.45)),
            *pair("much", (2, 0.1), (1, 0.8)),
            *pair("less-sure-but-right", (2, 0.45), (1, 0.40)),
            *pair("lost", (1, 0.9), (0, 0.1), dataset="dtd"),
            row("only-clip", "clip", 1, 0.9),
            row("only-use", "use", 1, 0.9),
        ],
        limit=2,
    )
    assert (result.baseline, result.method, result.compared) == ("clip", "use", 6)
    assert (result.to_right.answers, result.to_wrong.answers) == (3, 1)
    assert [change.image for change in result.to_right.largest] == ["much", "little"]
    (lost,) = result.to_wrong.largest
    assert (lost.dataset, lost.image, lost.seed, lost.label) == ("dtd", "lost", 0, 1)
    assert (lost.before, lost.after) == (MethodAnswer(1, 0.9, 0.9), MethodAnswer(0, 0.9, 0.1))
    assert lost.was_right
    assert not lost.is_right
    assert lost.size == pytest.approx(0.8)


def test_an_image_is_listed_once_under_the_seed_that_changed_it_the_most(tmp_path: Path) -> None:
    result = changes(
        tmp_path,
        [
            *pair("a", (2, 0.3), (1, 0.5), seed=0),
            *pair("a", (2, 0.3), (1, 0.9), seed=1),
            *pair("a", (2, 0.3), (1, 0.6), seed=2),
            *pair("a", (1, 0.6), (2, 0.5), seed=3),
            *pair("b", (2, 0.3), (1, 0.8), seed=0),
        ],
    )
    assert (result.compared, result.to_right.answers, result.to_wrong.answers) == (5, 4, 1)
    assert [(change.image, change.seed) for change in result.to_right.largest] == [("a", 1), ("b", 0)]
    assert [(change.image, change.seed) for change in result.to_wrong.largest] == [("a", 3)]


def test_seeds_that_one_method_lacks_are_not_compared(tmp_path: Path) -> None:
    result = changes(tmp_path, [row("a", "clip", 2, 0.1), row("a", "use", 1, 0.9, seed=1)])
    assert (result.compared, result.to_right.largest, result.to_wrong.largest) == (0, (), ())


def test_equal_changes_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = [answer for name in "cab" for answer in pair(name, (2, 0.25), (1, 0.75))]
    assert [change.image for change in changes(tmp_path, rows).to_right.largest] == ["a", "b", "c"]


def test_an_image_is_shown_as_the_model_saw_it_not_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    make_image(0, (60, 40)).save(tmp_path / "a.png", exif=exif)
    with Store(tmp_path / "run") as store:
        store.note("root", "animals", str(tmp_path))
        assert RunImages(store).open("animals", "a.png", 0).image.size == (60, 40)


@pytest.mark.parametrize("family", ["other", "fine-grained"])
def test_the_views_are_those_that_the_run_looked_at(tmp_path: Path, tiny_model: CLIP, family: str) -> None:
    names = ("a.png", "b.png")
    for i, name in enumerate(names):
        make_image(i).save(tmp_path / name)
    dataset = Dataset("animals", "Animals", family, CLASSES, names, (0, 1), tmp_path, "")  # type: ignore[arg-type]
    evaluate(tiny_model, [dataset], ["clip", "se"], tmp_path / "run", EvalSettings(views=6), seeds=(3,))
    text = ClassPrompts(tiny_model.text, CLASSES).features()
    with Store(tmp_path / "run", create=False) as store:
        for item in dataset:
            seen = store.shown_views("animals", item.id, 3)
            shown = RunImages(store).open("animals", item.id, 3)
            assert seen is not None
            assert [view for view, _ in shown.views] == list(seen.views)
            assert len(shown.views) == 4
            recipe = ViewRecipe(6, 32, augmix=family == "fine-grained", seed=3)
            expected = make_views(shown.image, item.id, recipe).float()
            for view, image in shown.views:
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                scale = 255 if family == "fine-grained" else 1
                assert (pixels - scale * expected[view.number]).abs().max() <= 0.5 + 1e-3
                logits = tiny_model.logit_scale * tiny_model.encode_images(pixels[None]) @ text.T
                assert float(entropy(logits)[0]) == pytest.approx(view.entropy, abs=0.02)
                assert int(logits.argmax()) == view.label


def test_a_run_that_does_not_record_its_folder_cannot_show_images(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store, pytest.raises(ImageError, match="does not record where its images are"):
        RunImages(store).open("animals", "a.png", 0)
