"""Answers that are none of the classes: scores, a calibration, and the same flag in every output."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from report.stores import answers, make_run
from usetta import Classifier, load_model
from usetta.cli import app
from usetta.evaluate.store import Store
from usetta.models.clip import CLIP
from usetta.rejection import Calibration, Rejection, calibrated, fit

CLASSES = ["tabby cat", "red fox", "golden retriever"]
PROBS = np.array([0.5, 0.3, 0.2], np.float32)


@pytest.mark.parametrize(
    ("by", "score"), [("confidence", 0.5), ("margin", 0.2), ("entropy", 1 - 1.0296530 / np.log(3))]
)
def test_scores(by: Any, score: float) -> None:
    rejection = Rejection(0.3, by)
    assert rejection.score(PROBS) == pytest.approx(score, abs=1e-6)
    assert rejection.rejects(PROBS) == (score < 0.3)
    assert rejection.score(np.ones(1)) == rejection.score(np.array([0.0, 1.0])) == 1
    assert Rejection(0, by).score(np.full(4, 0.25)) == pytest.approx(0.25 if by == "confidence" else 0, abs=1e-9)


def test_a_temperature_is_that_of_a_softmax_whose_other_classes_are_equal() -> None:
    logits = np.array([3.0, 1.0, 1.0, 1.0])
    cold, warm = (np.exp(logits / t) / np.exp(logits / t).sum() for t in (1.0, 2.5))
    assert calibrated(cold[0], 4, 2.5) == pytest.approx(warm[0])
    assert calibrated(np.array([0.25, 0.9]), 4, 1.0) == pytest.approx([0.25, 0.9])


def test_the_fit_finds_the_temperature_and_the_lowest_threshold() -> None:
    rng = np.random.default_rng(0)
    true = rng.uniform(0.2, 1.0, 20_000)  # the share that is right
    confidence = calibrated(true, 10, 0.5)  # which the model exaggerates
    right = rng.random(20_000) < true
    temperature, below = fit(confidence, right, np.full(20_000, 10), accuracy=0.9)
    assert temperature == pytest.approx(2, rel=0.03)
    kept = calibrated(confidence, 10, temperature) >= below
    assert right[kept].mean() >= 0.9
    assert right[calibrated(confidence, 10, temperature) >= below - 0.02].mean() < 0.9
    assert fit([0.8, 0.8], [True, True], [3, 3], 0.9)[1] == 0  # nothing needs to be rejected
    with pytest.raises(ValueError, match="no threshold keeps answers of which 90% are right: at best it is 50%"):
        fit([0.8, 0.8], [True, False], [3, 3], 0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reject_below": 1.5}, r"reject_below must lie in 0\.\.1, not 1\.5"),
        ({"reject": "entropy"}, "reject='entropy' needs reject_below"),
        ({"reject": "doubt", "reject_below": 0.1}, "reject must be one of confidence, entropy, margin, not 'doubt'"),
        ({"calibration": "nowhere.json"}, r"cannot read the calibration nowhere\.json: No such file"),
    ],
)
def test_wrong_settings(tiny_model: CLIP, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(CLASSES, tiny_model, **settings)


def test_a_classifier_says_which_answers_it_rejects(tiny_model: CLIP, images: list[Path]) -> None:
    plain = Classifier(CLASSES, tiny_model, views=8)(images)
    assert [answer.rejected for answer in plain] == [None] * len(plain)
    confidences = sorted(answer.confidence for answer in plain)
    below = (confidences[0] + confidences[1]) / 2  # so that one of them is rejected
    classifier = Classifier(CLASSES, tiny_model, views=8, reject_below=below)
    rejecting = classifier(images)
    assert [answer.rejected for answer in rejecting] == [answer.confidence < below for answer in plain]
    assert [answer.label for answer in rejecting] == [answer.label for answer in plain]
    (rejected,) = [answer for answer in rejecting if answer.rejected]
    assert f"none of these, closest: {rejected.label}" in repr(rejected)
    assert f"none of these, closest: <b>{rejected.label}</b>" in rejected._repr_html_()
    assert rejected.to_dict()["rejected"] is True
    assert rejected.to_row()["rejected"] is True
    labels = classifier.predict(images)
    assert [label == "none of these" for label in labels] == [answer.rejected for answer in rejecting]
    assert classifier.explain(images[rejecting.index(rejected)]).prediction.rejected


def test_calibrations_are_for_a_model_and_a_method(tiny_model: CLIP, images: list[Path], tmp_path: Path) -> None:
    known = Calibration("tiny", tiny_model.fingerprint, "se", 2.0, 0.5, 0.9, 0.8, 100)
    known.save(tmp_path / "calibration.json")
    answer = Classifier(CLASSES, tiny_model, views=8, calibration=tmp_path / "calibration.json")(images[0])
    assert answer.calibrated == pytest.approx(float(calibrated(answer.confidence, 3, 2.0)))
    assert answer.rejected == (answer.calibrated < 0.5)
    assert answer.to_dict()["calibrated"] == round(answer.calibrated, 6)
    kept = Classifier(CLASSES, tiny_model, views=8, calibration=known, reject_below=0.0)(images[0])
    assert not kept.rejected
    with pytest.raises(ValueError, match="fitted on the method se, not on use"):
        Classifier(CLASSES, tiny_model, "use", views=8, calibration=known)
    with pytest.raises(
        ValueError, match="fitted on the model tiny, and tiny.* is another, or the same in another prec"
    ):
        Classifier(CLASSES, tiny_model, views=8, calibration=replace(known, fingerprint="0"))
    with pytest.raises(ValueError, match="a calibration is about the confidence: leave out reject='margin'"):
        Classifier(CLASSES, tiny_model, views=8, calibration=known, reject="margin")
    (tmp_path / "calibration.json").write_text("[]")
    with pytest.raises(ValueError, match=r"calibration\.json is not a calibration, which `usetta calibrate` writes"):
        Calibration.load(tmp_path / "calibration.json")


# The command line


def usetta(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_output_of_classify_has_the_flag(tiny_checkpoint: Path, images: list[Path], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    asked = ["classify", images[0], "-c", ",".join(CLASSES), "--model", tiny_checkpoint, "--views", 8, "--reject-below"]
    for below, rejected in ((1, True), (0, False)):
        text, as_json, as_csv = (usetta(*asked, below, *flag).stdout for flag in ([], ["--json"], ["--csv"]))
        assert ("none of these  (closest: " in text) == rejected
        assert json.loads(as_json)["rejected"] is rejected
        (row,) = csv.DictReader(io.StringIO(as_csv))
        assert (row["rejected"], row["calibrated"]) == (str(rejected).lower(), "")
        out = tmp_path / f"{below}.parquet"
        assert usetta(*asked, below, "--out", out).exit_code == 0
        assert parquet.read_table(out)["rejected"].to_pylist() == [rejected]
    refused = usetta(*asked, 0.5, "--out", tmp_path / "1.parquet")
    assert "were made with other settings (rejection was" in refused.stderr


def test_calibrate_and_classify_with_it(tiny_checkpoint: Path, images: list[Path], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "calibration.json"
    make_run(run, [*answers("pets", "se", "1" * 16 + "0" * 4), *answers("pets", "use", "1")])
    asked = ["calibrate", run, "--out", out]
    assert "the run has several methods: choose one with --method (se, use)" in usetta(*asked).stderr
    assert "the run has no method 'tpt'; it has se, use" in usetta(*asked, "--method", "tpt").stderr
    assert "no threshold keeps answers of which 90% are right" in usetta(*asked, "--method", "se").stderr
    done = usetta(*asked, "--method", "se", "--accuracy", 0.75)
    assert done.exit_code == 0, done.stderr
    # All answers have a confidence of 0.8, and 80 % of them are right.
    assert "temperature 1.0" in done.stdout
    assert "threshold 0.000: 100.0% of the answers are kept, and 80.0% of these are right; of all, 80.0%" in done.stdout
    loaded = load_model(str(tiny_checkpoint))
    known = replace(Calibration.load(out), fingerprint=loaded.fingerprint, reject_below=1.0)
    known.save(out)
    classify = ["classify", images[0], "-c", ",".join(CLASSES), "--model", tiny_checkpoint, "--views", 8, "--json"]
    result = usetta(*classify, "--calibration", out)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["rejected"] is True
    assert 0 < answer["calibrated"] < 1
    with Store(run) as store:
        assert store.facts("run")["model"]["name"] == known.model


def test_a_temperature_is_of_the_confidence_alone() -> None:
    with pytest.raises(ValueError, match="a calibration is about the confidence: leave out reject='margin'"):
        Rejection(0.5, "margin", temperature=2.0)


def test_a_calibration_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    Calibration("tiny", "0", "se", 1.5, 0.4, 0.9, 0.8, 100).save(path)
    assert Calibration.load(path).temperature == 1.5
    path.write_text(path.read_text().replace('"usetta_calibration": 1', '"usetta_calibration": 2'))
    with pytest.raises(ValueError, match=r"calibration\.json is not a calibration.*\(it is of another version\)"):
        Calibration.load(path)


def test_without_answers_nothing_is_fitted() -> None:
    with pytest.raises(ValueError, match="there are no answers to fit on"):
        fit([], [], [], 0.9)
