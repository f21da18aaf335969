"""Runs of methods with a memory: orders, what is refused, images of other classes, and attacked images."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluate.runs import Counting, content, downgrade, four_blocks, make_dataset
from models.tiny import TINY_VIT, disturbed
from usetta.data import DataError, Dataset, load_dataset
from usetta.evaluate.attack import AttackSettings, attack, perturbed
from usetta.evaluate.orders import StreamOrder
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import Store, StoreError
from usetta.models.precision import prepare
from usetta.report.results import accuracy_table
from usetta.report.trust import trust_table

IDS = [f"{i}.png" for i in range(60)]
LABELS = [i % 6 for i in range(60)]


@pytest.mark.parametrize("text", ["shuffled", "class-blocks:2", "dirichlet:0.1"])
def test_an_order_has_every_image_once_and_depends_on_the_seed_alone(text: str) -> None:
    order = StreamOrder.parse(text)
    assert str(order) == text
    places = [order.places(IDS, LABELS, seed) for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2]
    assert sorted(places[0]) == list(range(60))


def test_blocks_and_dirichlet_bring_classes_together() -> None:
    blocks = [LABELS[i] for i in StreamOrder.parse("class-blocks:2").places(IDS, LABELS, 0)]
    assert [len({*blocks[first : first + 20]}) for first in (0, 20, 40)] == [2, 2, 2]

    def changes(text: str) -> int:
        labels = [LABELS[i] for i in StreamOrder.parse(text).places(IDS, LABELS, 0)]
        return int(np.count_nonzero(np.diff(labels)))

    assert changes("dirichlet:0.01") < changes("dirichlet:1000")


@pytest.mark.parametrize("text", ["sorted", "class-blocks", "class-blocks:1.5", "dirichlet:0", "shuffled:2"])
def test_an_order_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="order"):
        StreamOrder.parse(text)


def test_a_run_of_streams(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 12)
    other = replace(make_dataset(tmp_path / "others", 12), name="other", ids=dataset.ids[:5], labels=(0,) * 5)
    model = Counting(four_blocks())
    methods, settings = ["clip", "tda", "dmn"], EvalSettings(views=4)
    options = {"seeds": (0, 1), "order_seeds": (0, 1), "ood": [other]}
    evaluate(model, [dataset], methods, tmp_path / "run", settings, **options)
    encoded = model.encoded
    first = content(tmp_path / "run")
    assert evaluate(model, [dataset], methods, tmp_path / "run", settings, **options).rows == 0
    # Another method sees the same orders, without encoding anything again.
    evaluate(model, [dataset], ["onzeta"], tmp_path / "run", settings, **options)
    assert model.encoded == encoded
    rows = [row for row in first.rows if row.dataset == "things" and row.method == "tda"]
    assert len(rows) == 12 * 2 * 2
    positions = {order: {row.position: row.image for row in rows if row.order_seed == order} for order in (0, 1)}
    assert sorted(positions[0]) == list(range(12))
    assert positions[0] != positions[1]
    assert {row.order_seed for row in first.rows if row.method == "clip"} == {-1}
    with pytest.raises(StoreError, match="images was 12 and is now 6"):
        evaluate(model, [dataset], methods, tmp_path / "run", settings, limit=6)
    with pytest.raises(StoreError, match="order was 'shuffled' and is now 'class-blocks:1'"):
        evaluate(model, [dataset], methods, tmp_path / "run", settings, order="class-blocks:1")
    with Store(tmp_path / "run") as store:
        accuracy = {row.name: row.cells["things"] for row in accuracy_table(store).rows}
        trust = {row.name: row.cells for row in trust_table(store).rows}
        compared = trust_table(store, "clip")
    by_order = [np.mean([row.label == row.prediction for row in rows if row.order_seed == o]) for o in (0, 1)]
    assert accuracy["tda"].value == pytest.approx(100 * np.mean(by_order))
    assert accuracy["tda"].std == pytest.approx(100 * np.std(by_order))
    assert trust["tda"]["orders"].value == accuracy["tda"].std
    assert trust["clip"]["orders_change"].value is None
    assert trust["clip"]["auroc msp other"].value is not None
    assert "auroc energy other" not in trust["dmn"]  # its answers are probabilities
    top1 = next(row for row in compared.rows if row.name == "tda" and "top-1" in row.section)
    difference = trust["tda"]["top1"].value - trust["clip"]["top1"].value
    assert top1.cells["difference"].value == pytest.approx(difference)
    assert top1.cells["low"].value <= difference <= top1.cells["high"].value


def test_images_of_other_classes_are_read_where_they_are(tmp_path: Path) -> None:
    """Those of packed files and those of plain ones may be mixed."""
    files = make_dataset(tmp_path / "images", 5)
    others = replace(make_dataset(tmp_path / "others", 5), name="other", ids=files.ids[:2], labels=(0, 0))
    rows = {}
    for name, (dataset, other) in {
        "files": (files, others),
        "packed": (unfiled(files), others),
        "others packed": (files, unfiled(others)),
    }.items():
        done = evaluate(four_blocks(), [dataset], ["clip"], tmp_path / name, EvalSettings(views=2), ood=[other])
        assert done.failed == 0
        rows[name] = content(tmp_path / name).rows
    assert len(rows["files"]) == 5 + 2
    assert rows["files"] == rows["packed"] == rows["others packed"]
    with pytest.raises(DataError, match="things cannot be out of distribution for itself"):
        evaluate(four_blocks(), [files], ["clip"], tmp_path / "self", EvalSettings(views=2), ood=[files])


def unfiled(dataset: Dataset) -> Dataset:
    """The same images, which only a reader knows how to find."""
    folder = dataset.root
    return replace(dataset, root=folder / "packed", reader=lambda image: (folder / image).read_bytes())


def test_a_store_of_the_version_before_gets_the_new_columns(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 6)
    evaluate(four_blocks(), [dataset], ["clip"], tmp_path / "run", EvalSettings(views=2))
    before = content(tmp_path / "run").rows
    downgrade(tmp_path / "run")
    assert content(tmp_path / "run").rows == [replace(row, entropy=None, energy=None) for row in before]


def test_an_attack_stays_within_epsilon_and_works(tmp_path: Path) -> None:
    dataset, model = make_dataset(tmp_path / "images", 12), four_blocks()
    done = attack(model, dataset, tmp_path / "attacked", AttackSettings(epsilon=8))
    assert done.images == 12
    assert done.after <= done.before
    attacked = load_dataset(tmp_path / "attacked")
    assert attacked.labels == dataset.labels
    again = attack(model, dataset, tmp_path / "attacked", AttackSettings(epsilon=8))
    assert again == done
    with pytest.raises(ValueError, match="another attack"):
        attack(model, dataset, tmp_path / "attacked", AttackSettings(epsilon=4))
    size = model.image_size
    pixels = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    text = torch.nn.functional.normalize(torch.randn(5, model.embed_dim), dim=-1)
    moved = perturbed(model, pixels, text, 2, AttackSettings(epsilon=4), "a")
    assert (moved.int() - pixels.int()).abs().max() == 4
    before, after = ((model.encode_images(p) @ text.T).softmax(dim=-1)[0, 2] for p in (pixels, moved))
    assert after < before


def test_an_attack_leaves_out_images_that_cannot_be_read(tmp_path: Path) -> None:
    dataset, model, lines = make_dataset(tmp_path / "images", 6), disturbed(TINY_VIT), list[str]()
    dataset[0].path.write_bytes(b"no image")
    done = attack(model, dataset, tmp_path / "attacked", AttackSettings(steps=1), log=lines.append)
    assert done.images == 5
    (failed,) = done.failed
    assert failed.startswith("0/image-0.png: not an image, or in an unsupported format")
    assert lines == [f"things: {failed}"]
    assert load_dataset(tmp_path / "attacked").labels == (1, 2, 3, 4, 0)
    dataset[1].path.unlink()
    with pytest.raises(DataError, match="no image of red fox in things could be read; restore one and rerun"):
        attack(model, dataset, tmp_path / "attacked", AttackSettings(steps=1))
    for item in dataset:
        item.path.unlink(missing_ok=True)
    with pytest.raises(DataError, match="no image of things could be read"):
        attack(model, dataset, tmp_path / "gone", AttackSettings(steps=1))


def test_packed_images_are_attacked_as_those_in_files(tmp_path: Path) -> None:
    files, model, settings = make_dataset(tmp_path / "images", 2), disturbed(TINY_VIT), AttackSettings(steps=1)
    done = [attack(model, dataset, tmp_path / f"out{n}", settings) for n, dataset in enumerate((files, unfiled(files)))]
    assert done[0] == done[1]
    assert done[0].images == 2
    written = [sorted(path.read_bytes() for path in (tmp_path / f"out{n}" / "images").iterdir()) for n in range(2)]
    assert written[0] == written[1]


def test_what_cannot_be_attacked_is_refused(tmp_path: Path) -> None:
    dataset, model = make_dataset(tmp_path / "images"), disturbed(TINY_VIT)
    with pytest.raises(DataError, match="the images of things have no labels to attack"):
        attack(model, replace(dataset, labels=None), tmp_path / "out")
    with pytest.raises(ValueError, match=r"so few images leave some classes without any \(3\): raise --limit"):
        attack(model, dataset, tmp_path / "out", limit=2)
    prepare(model, "bf16")
    with pytest.raises(ValueError, match="use a model of usetta in fp32"):
        attack(model, dataset, tmp_path / "out")
    assert not (tmp_path / "out").exists()
