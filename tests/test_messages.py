"""Every error and warning of the command line, compared with `messages.txt`, so that somebody has read each of them.

After a change of a message, write the file again and read what changed:

    PYTHONPATH=tests USETTA_WRITE_MESSAGES=1 python -m pytest tests/test_messages.py && git diff tests/messages.txt
"""

import io
import json
import os
import re
import shlex
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conftest import make_image
from report.stores import answers, make_run
from usetta import AnswerWarning
from usetta import images as image_files
from usetta.cli import app
from usetta.evaluate.store import Store
from usetta.models.clip import TextTransformer

GOLDEN = Path(__file__).with_name("messages.txt")
CLASSIFY = "classify cat.png -c 'tabby cat,red fox' --model tiny --views 4"
COMMANDS = f"""
classify cat.png
{CLASSIFY} --json --csv
{CLASSIFY} --out answers.parquet --json
{CLASSIFY} --top 0
{CLASSIFY} --views 0
{CLASSIFY} --views 100000
{CLASSIFY} --views 1
{CLASSIFY} --method use --views 1
{CLASSIFY} --method ues
{CLASSIFY} --method tpt+see
{CLASSIFY} --method zero+se
{CLASSIFY} --method dmn+se
{CLASSIFY} --method tda:values=published
{CLASSIFY} --method tda --out answers
{CLASSIFY} --method use:step=2
{CLASSIFY} --method use:steps=many
{CLASSIFY} --method use:steps
{CLASSIFY} --method use:steps=0
{CLASSIFY} --method use:gamma=2
{CLASSIFY} --method tpt:lr=1e30
{CLASSIFY} --method use --template 'a {{}}.' --template 'the {{}}.'
{CLASSIFY} --method use --template '{{}} on a photo.'
{CLASSIFY} --template 'a photo'
{CLASSIFY} --classes ' , '
{CLASSIFY} --classes 'tabby cat'
{CLASSIFY} --classes 'hen,hen,tabby cat'
{CLASSIFY} --classes '猫,犬'
{CLASSIFY} --classes 'tabby cat,zorkmid,grue'
{CLASSIFY} --classes @nowhere.txt
{CLASSIFY} --classes @cat.png
{CLASSIFY} --model nowhere.safetensors
{CLASSIFY} --model ViT-B-17
{CLASSIFY} --model cat.pt
{CLASSIFY} --precision fp8
{CLASSIFY} --precision fp16
{CLASSIFY} --precision int8 --compile
{CLASSIFY} --precision int8 --method ttl
{CLASSIFY} --device toaster
{CLASSIFY} --context nowhere.safetensors
{CLASSIFY} --context cat.png
{CLASSIFY} --max-pixels 100
{CLASSIFY} --reject-below 2
{CLASSIFY} --reject entropy
{CLASSIFY} --reject doubt --reject-below 0.5
{CLASSIFY} --calibration nowhere.json
{CLASSIFY} --calibration cat.png
{CLASSIFY} nowhere.jpg
{CLASSIFY} 'photos/*.bmp'
{CLASSIFY} @nowhere.txt
{CLASSIFY} @list.txt
{CLASSIFY} https://example.org/cat.png
{CLASSIFY} --allow-urls strange://example.org/cat.png
{CLASSIFY} -
{CLASSIFY} photos
{CLASSIFY} damaged.tar
{CLASSIFY} two.parquet
{CLASSIFY} two.parquet --column c
{CLASSIFY} two.parquet --column n
{CLASSIFY} cat.parquet
{CLASSIFY} --engine ray
{CLASSIFY} --engine spark
{CLASSIFY} --out there --engine ray --address nowhere
{CLASSIFY} --out there --rank 0
{CLASSIFY} --out there --rank 2 --world-size 2
{CLASSIFY} --out answers.parquet --rank 0 --world-size 2
{CLASSIFY} --out answers.parquet --engine ray --rank 0 --world-size 2
{CLASSIFY} --out cat.png
{CLASSIFY} --out photos
{CLASSIFY} --out cat.parquet
{CLASSIFY} --out done.parquet
{CLASSIFY} --out done.parquet --seed 1
classify unreadable -c cat --model tiny
classify empty -c cat --model tiny
explain cat.heic -c cat,dog --model tiny
explain cat.png -c cat,dog --model tiny --out why.xyz
explain cat.png -c cat,dog --model tiny --out nowhere/why.png
explain list.txt -c cat,dog --model tiny
explain photos -c cat,dog --model tiny
eval --out run
eval --out run --data nowhere
eval --out run --data empty
eval --out run --data unlabelled
eval --out run --data parts
eval --out run --data zoo --datasets pats
eval --out run --datasets pets
eval --out run --datasets ./broken.csv
eval --out run --data zoo --methods ,
eval --out run --data zoo --seeds 0,x
eval --out run --data zoo --order-seeds 0,x
eval --out run --data zoo --model tiny --views 4 --methods tda --order sorted
eval --out run --data zoo --model tiny --views 4 --methods tda --order class-blocks
attack zoo --out attacked --model tiny --limit 1
eval --out run --data zoo --model tiny --views 4 --methods clip
eval --out run --data zoo --model tiny --views 8 --methods clip
merge run
merge shards
table nowhere
table started
table measured --metric eec
table measured --dataset pet
table measured --baseline tpt
table measured --baseline clip --metric ece
table measured --metrics --dataset pets
table measured --format html
export measured rows.xls
export measured nowhere/rows.csv
report measured --baseline tpt
reproduce table-99
reproduce table-1 --data nowhere
reproduce table-3 --context cat.png
reproduce all
reproduce all --data data --context cat.png --train-coop photos
eval --data zoo --out run --protocol tta
eval --data zoo --out run --family imagnet
data check nowhere
data check . --only petss
data fetch petss .
data fetch dtd . --quiet
data import pets photos --data .
data import cub photos --data .
coop train nowhere --out context.safetensors
coop train zoo --out context.safetensors --model tiny --template '{{}}.'
coop train zoo --out context.safetensors --init zeros
models pull ViT-B-17
serve --api-key-file empty.txt
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("USETTA_DATA", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("usetta.data.download.urllib.request.OpenerDirector.open", _offline)
    monkeypatch.setattr(image_files, "_can_open", lambda name: False)
    monkeypatch.setattr(TextTransformer, "familiarity", _Familiarity())
    Path("tiny").symlink_to(tiny_checkpoint)
    for name in ("photos", "unreadable", "empty", "zoo/cat", "zoo/red fox", "parts/train", "parts/test", "unlabelled"):
        Path(name).mkdir(parents=True)
    make_image(0).save("cat.png")
    for name in ("photos/cat.png", "zoo/cat/1.png", "zoo/red fox/2.png", "unlabelled/1.png"):
        make_image(1).save(name)
    Path("photos/\x1b[31mred.png").write_bytes(b"no image")
    Path("zoo/cat/bad.jpg").write_bytes(b"")
    for name in ("photos/1.heic", "photos/2.HEIC", "photos/3.avif", "photos/4.dng", "unreadable/1.heic"):
        Path(name).touch()
    Path("cat.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    for name in ("cat.parquet", "cat.pt"):
        Path(name).write_bytes(Path("cat.png").read_bytes())
    Path("list.txt").write_text("cat.png\nnowhere.png\nhttps://example.org/cat.png\n")
    Path("empty.txt").touch()
    Path("broken.csv").write_text("path,label\nzoo/cat/1.png,0\nzoo/cat/1.png,1\n")
    Path("unlabelled/manifest.json").write_text(json.dumps({"items": [["1.png"]]}))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add("cat.png")
        tar.add("photos/cat.png")
    Path("damaged.tar").write_bytes(content.getvalue()[:12_000])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": ["cat.png"], "b": ["cat.png"], "n": [1]}), "two.parquet")
    with make_run(Path("measured"), [*answers("pets", "clip", "10"), *answers("pets", "use", "11")]):
        pass
    Store(Path("started"))
    Store(Path("shards/shards/0-of-2"))
    return tmp_path


class _Familiarity:
    def unfamiliar(self, names: Sequence[str], _features: torch.Tensor) -> list[str]:
        return [name for name in names if name in ("zorkmid", "grue")]


def _offline(*_: object, **__: object) -> None:
    raise OSError("[Errno -2] Name or service not known")


def test_messages(folder: Path, tiny_checkpoint: Path) -> None:
    shown = "\n".join(
        f"$ usetta {line}\n{_run(line, folder, tiny_checkpoint)}" for line in COMMANDS.split("\n") if line
    )
    if os.environ.get("USETTA_WRITE_MESSAGES"):
        GOLDEN.write_text(shown, encoding="utf-8")
    assert shown == GOLDEN.read_text(encoding="utf-8")
    assert "Traceback" not in shown


def _run(line: str, folder: Path, checkpoint: Path) -> str:
    """What a command prints to standard error, and its exit code, without what differs between machines."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", AnswerWarning)  # the same text may have been shown before
        result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, shlex.split(line))
    assert result.exit_code != 2 or result.stdout == "", line
    assert result.exception is None or isinstance(result.exception, SystemExit), (line, result.exception)
    boxed = re.findall(r"^│ (.*?) *│$", result.stderr, flags=re.MULTILINE)  # rich frames the errors of typer
    text = "\n".join(boxed) + "\n" if boxed else result.stderr
    text = text.replace(f"{folder}/", "").replace(str(folder), ".").replace(str(checkpoint), "tiny")
    text = re.sub(r"\b\d+(\.\d+)? s\b", "N s", text)
    # What is wrong with a number is said in typer's words, which differ between its versions.
    text = re.sub(
        r"(?<=': )(.* is not in the range .*|Input should be (?:greater|less) than .*)", "(out of range)", text
    )
    return f"{text}exit code {result.exit_code}\n"
