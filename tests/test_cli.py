"""The command line as a user meets it: what it prints, where, and how it exits."""

import copy
import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conftest import make_image
from models.tiny import TINY_RESNET, disturbed
from usetta import Classifier, __version__, methods
from usetta.cli import app
from usetta.images import open_image
from usetta.models.checkpoints import save_model
from usetta.models.clip import CLIP
from usetta.models.precision import prepare

CLASSES = "tabby cat,red fox,golden retriever"


def usetta(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def options(tiny_checkpoint: Path) -> list[object]:
    return ["--classes", CLASSES, "--model", tiny_checkpoint, "--views", "8"]


def test_text_names_each_image_and_its_class(options: list[object], images: list[Path], tiny_model: CLIP) -> None:
    result = usetta("classify", images[0].parent, *options)
    assert result.exit_code == 0
    expected = Classifier(CLASSES.split(","), tiny_model, views=8)(images)
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    for line, image, answer in zip(lines, images, expected, strict=True):
        assert line.startswith(f"{image}  {answer.label}  {answer.confidence:.1%}")
    assert result.stderr.startswith("model: ")
    assert re.search(r"^5 images in \d+\.\d s, views per image: 8$", result.stderr, flags=re.MULTILINE)
    ranked = ", ".join(f"{label}  {probability:.1%}" for label, probability in expected[0].ranked(3))
    top = usetta("classify", images[0], *options, "--top", 3)
    assert top.stdout.startswith(f"{images[0]}  {ranked}")
    assert re.search(r"^1 image in \d+\.\d s, 8 views$", top.stderr, flags=re.MULTILINE)


def test_every_kind_of_source_gives_the_same_answers(
    options: list[object], images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text("".join(f"images/{image.name}\n" for image in images))
    with tarfile.open("images.tar", "w") as tar:
        tar.add("images")
    expected = [line.split("  ", 1)[1] for line in usetta("classify", *images, *options).stdout.splitlines()]
    for source, prefix in (
        ("images", "images/"),
        ("images/*.png", "images/"),
        ("@list.txt", "images/"),
        ("list.txt", "images/"),
        ("images.tar", "images.tar/images/"),
    ):
        result = usetta("classify", source, *options)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [
            f"{prefix}{image.name}  {answer}" for image, answer in zip(images, expected, strict=True)
        ]
    piped = usetta("classify", "-", *options, stdin=images[2].read_bytes())
    assert piped.stdout == f"-  {expected[2]}\n"


def test_names_cannot_move_the_cursor_or_be_run_by_a_spreadsheet(options: list[object], images: list[Path]) -> None:
    images[0].rename(images[0].with_name("=1+\x1b[31m\u202e\n.png"))
    folder = images[0].parent
    text = usetta("classify", f"{folder}/=1*", *options).stdout
    assert text.startswith(rf"{folder}/=1+\x1b[31m\u202e\n.png  ")
    assert len(text.splitlines()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        row = next(csv.DictReader(io.StringIO(usetta("classify", ".", *options, "--csv").stdout)))
        assert row["source"] == "'=1+\x1b[31m\u202e\n.png"


def test_quiet_and_verbose(options: list[object], images: list[Path], tmp_path: Path) -> None:
    quiet = usetta("classify", *images[:2], *options, "--quiet")
    assert (len(quiet.stdout.splitlines()), quiet.stderr) == (2, "")
    assert usetta("classify", *images[:2], *options, "-q", "--out", tmp_path / "out").stderr == ""
    verbose = usetta("classify", *images[:2], *options, "-v")
    assert verbose.stdout == quiet.stdout
    assert f"{images[0]}: 8 views; the image itself counts" in verbose.stderr
    failed = usetta("classify", *images, *options, "-v", "--method", "ues")
    assert failed.stderr.startswith("Traceback")
    assert failed.stderr.splitlines()[-1] == "usetta: unknown method 'ues'; did you mean 'use'?"


def test_json_is_one_object_per_line(options: list[object], images: list[Path]) -> None:
    result = usetta("classify", *images, *options, "--json", "--top", 2)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["source"] for row in rows] == [str(image) for image in images]
    for row in rows:
        assert len(row["ranked"]) == 2
        assert row["ranked"][0] == {"label": row["label"], "probability": row["probability"]}
        assert len(row["why"]["entropies"]) == 8


def test_precision_reaches_the_image_tower(options: list[object], images: list[Path], tiny_model: CLIP) -> None:
    small = copy.deepcopy(tiny_model)
    prepare(small, "int8")
    expected, exact = (Classifier(CLASSES.split(","), model, views=8)(images) for model in (small, tiny_model))
    assert [answer.confidence for answer in expected] != [answer.confidence for answer in exact]
    result = usetta("classify", *images, *options, "--json", "--precision", "int8")
    answered = [json.loads(line)["probability"] for line in result.stdout.splitlines()]
    assert answered == pytest.approx([answer.confidence for answer in expected], abs=2e-6)
    assert usetta("explain", images[0], *options, "--precision", "int8", "--json").exit_code == 0


def test_csv_has_a_header_and_a_row_per_image(options: list[object], images: list[Path]) -> None:
    result = usetta("classify", *images, *options, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["source"] for row in rows] == [str(image) for image in images]
    ranked = list(csv.DictReader(io.StringIO(usetta("classify", *images, *options, "--csv", "--top", 2).stdout)))
    assert all(0 < float(row["probability_2"]) <= float(row["probability"]) for row in ranked)
    assert all(row["label"] in CLASSES.split(",") and 0 < float(row["probability"]) <= 1 for row in rows)


def test_a_bad_image_is_reported_and_skipped(options: list[object], images: list[Path]) -> None:
    images[1].write_bytes(b"this is no image")
    text, as_json, as_csv = (usetta("classify", *images, *options, *flag) for flag in ([], ["--json"], ["--csv"]))
    assert [r.exit_code for r in (text, as_json, as_csv)] == [1, 1, 1]
    assert len(text.stdout.splitlines()) == 4
    assert f"usetta: {images[1]}: not an image" in text.stderr
    assert "1 of 5 images could not be read" in text.stderr
    assert "not an image" in json.loads(as_json.stdout.splitlines()[1])["error"]
    assert "not an image" in list(csv.DictReader(io.StringIO(as_csv.stdout)))[1]["error"]


def test_classes_from_a_file(images: list[Path], options: list[object], tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("tabby cat\n\n  red fox \ngolden retriever\n", encoding="utf-8-sig")
    from_file = usetta("classify", *images, *options, "--classes", f"@{file}", "--json")
    assert from_file.exit_code == 0
    assert from_file.stdout == usetta("classify", *images, *options, "--json").stdout


def test_templates_make_an_ensemble(images: list[Path], options: list[object], tiny_model: CLIP) -> None:
    result = usetta("classify", images[0], *options, "-t", "a {}.", "-t", "art of the {}.", "--json")
    expected = Classifier(CLASSES.split(","), tiny_model, views=8, templates=["a {}.", "art of the {}."])(images[0])
    assert json.loads(result.stdout)["probability"] == pytest.approx(expected.confidence, abs=1e-5)


@pytest.mark.parametrize("method", ["use", "use:steps=2:skip=false", "tpt+se", "r-tpt"])
def test_methods_that_tune_the_prompt(images: list[Path], options: list[object], tiny_model: CLIP, method: str) -> None:
    result = usetta("classify", *images, *options, "--json", "-m", method)
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    expected = Classifier(CLASSES.split(","), tiny_model, method, views=8)(images)
    for row, answer in zip(rows, expected, strict=True):
        assert row["probability"] == pytest.approx(answer.confidence, abs=1e-4)
        assert row["why"]["skipped"] is answer.skipped
        assert row["why"]["before"]["probability"] == pytest.approx(answer.before.max(), abs=1e-4)  # type: ignore[union-attr]
        assert row["why"]["weights"] == pytest.approx(answer.weights, abs=1e-5)


def test_a_residual_network_is_tuned_as_well(images: list[Path], tmp_path: Path) -> None:
    model = disturbed(TINY_RESNET)
    file = save_model(model, tmp_path).parent
    result = usetta("classify", images[0], "-c", CLASSES, "--model", file, "--views", 6, "-m", "tpt", "--json")
    assert result.exit_code == 0, result.stderr
    expected = Classifier(CLASSES.split(","), model, "tpt", views=6)(images[0])
    assert json.loads(result.stdout)["why"]["reason"].startswith("tuned: ")
    assert json.loads(result.stdout)["probability"] == pytest.approx(expected.confidence, abs=1e-4)


def test_explain_writes_a_figure(options: list[object], images: list[Path], tmp_path: Path) -> None:
    result = usetta("explain", images[0], *options)
    figure = images[0].with_name("image-0-explained.png")
    assert result.exit_code == 0
    assert f"figure: {figure}" in result.stdout
    assert "the image itself counts " in result.stdout
    assert open_image(figure).width > 1000
    tuned = usetta("explain", images[0], *options, "-m", "use:skip=false")
    assert tuned.stdout.splitlines()[1].startswith("tuned: ")
    as_json = usetta("explain", images[0], *options, "--json", "--out", tmp_path / "f.svg")
    assert json.loads(as_json.stdout)["figure"] == str(tmp_path / "f.svg")
    assert "<svg" in (tmp_path / "f.svg").read_text(encoding="utf-8")


def test_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path))
    rows = json.loads(usetta("ls", "methods", "--json").stdout)
    assert [row["name"] for row in rows] == [*methods.names(), *methods.stream_names()]
    models = {row["name"]: row for row in json.loads(usetta("ls", "models", "--json").stdout)}
    assert {"auto", "embedded", "ViT-B-16", "RN50"} <= set(models)
    assert models["embedded"]["cached"] is False


def test_the_list_of_methods_is_narrow_and_shows_the_grammar() -> None:
    shown, as_json = usetta("ls", "methods"), usetta("ls", "methods", "--json")
    for name in (*methods.names(), *methods.stream_names()):
        assert any(line.split(" ")[0] == name for line in shown.stdout.splitlines())
    assert max(map(len, (shown.stdout + shown.stderr).splitlines())) <= 80
    assert "tpt+se" in shown.stderr
    assert "use:steps=4:gamma=0.2" in shown.stderr
    assert methods.get("use:steps=4:gamma=0.2").steps == 4
    assert as_json.stderr == ""
    assert "NAME+READOUT" in usetta("ls", "methods", "--help").stdout


def test_version_and_help_need_nothing_heavy() -> None:
    assert usetta("--version").stdout.strip() == f"usetta {__version__}"
    heavy = "import sys; from usetta.cli import app; import typer.testing; "
    script = (
        heavy
        + "typer.testing.CliRunner().invoke(app, ['--help']); print(sorted({'torch','numpy','PIL'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_installed_command_shows_progress_beside_its_answers_and_exits_as_promised(
    images: list[Path], options: list[object]
) -> None:
    images[0].write_bytes(b"")
    terminal, side = pty.openpty()
    command = [str(word) for word in (sys.executable, "-m", "usetta", "classify", *images, *options, "--json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=side, text=True, check=False)
    os.close(side)
    assert done.returncode == 1
    assert [json.loads(line)["source"] for line in done.stdout.splitlines()] == [str(image) for image in images]
    shown = os.read(terminal, 100_000)
    assert b"5/5" in shown
    assert b"Traceback" not in shown
    os.close(terminal)


def test_a_reader_that_has_seen_enough_is_no_error(images: list[Path], options: list[object]) -> None:
    command = [str(word) for word in (sys.executable, "-m", "usetta", "classify", *images, *options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        errors = running.stderr.read()
    assert "model: " in errors
    assert "Broken pipe" not in errors
    assert "Traceback" not in errors


def test_a_context_is_learned_and_used(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate(["red_fox", "owl"]):
        (tmp_path / "shown" / name).mkdir(parents=True)
        for i in range(3):
            make_image(10 * number + i).save(tmp_path / "shown" / name / f"{i}.png")
    out, folder = tmp_path / "context.safetensors", tmp_path / "shown"
    settings = ["--out", out, "--model", tiny_checkpoint, "--epochs", 2, "--views", 2]
    learned = usetta("coop", "train", folder, *settings)
    assert (learned.exit_code, learned.stdout) == (0, f"context: {out}\n")
    assert "up to 16 images of each of 2 classes" in learned.stderr
    assert "is already finished" in usetta("coop", "train", folder, *settings).stderr
    asked = [
        "classify",
        folder / "owl" / "0.png",
        "-c",
        "red fox,owl",
        "--model",
        tiny_checkpoint,
        "-m",
        "clip",
        "--json",
    ]
    plain, tuned = (json.loads(usetta(*asked, *more).stdout)["probability"] for more in ([], ["--context", out]))
    assert plain != tuned
    nowhere = usetta("coop", "train", tmp_path / "nowhere", *settings)
    assert (nowhere.exit_code, nowhere.stderr) == (1, f"usetta: {tmp_path / 'nowhere'} does not exist\n")


def test_datasets_are_listed_and_checked(tmp_path: Path) -> None:
    listed = json.loads(usetta("ls", "datasets", "--json").stdout)
    assert len(listed) == 15
    assert {"name": "dtd", "title": "DTD", "family": "fine-grained", "images": 1692, "classes": 47} in listed
    reports = json.loads(usetta("data", "check", tmp_path, "--json").stdout)
    assert {report["state"] for report in reports} == {"absent"}
    assert usetta("data", "check", tmp_path).exit_code == 0
    assert usetta("data", "check", tmp_path, "--only", "pets").exit_code == 1
    unknown = usetta("data", "check", tmp_path, "--only", "petss")
    assert unknown.exit_code == 2
    assert "did you mean 'pets'?" in unknown.stderr
    manual = usetta("data", "fetch", "imagenet", tmp_path)
    assert manual.exit_code == 1
    assert manual.stdout.startswith(
        "imagenet: absent\n1. Accept the terms at https://huggingface.co/datasets/ILSVRC/imagenet-1k"
    )
