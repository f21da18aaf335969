"""The progress bar: one line in a terminal of any width, and nothing where nobody watches."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path

import pytest

from usetta.progress import bar, be_quiet, track, waiting

FOUR = "clip 63.2 %, c-tpt 65.1 %, r-tpt 64.0 %, use 66.6 %"


def in_terminal(script: str, columns: int, folder: Path) -> tuple[list[str], str, str]:
    """What a terminal of that width shows, drawing by drawing, all that it was sent, and standard output.

    Standard output goes to a file, as of somebody who keeps the answers.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=out, stderr=theirs, env=environment | {"TERM": "xterm-256color"}
        )
    os.close(theirs)
    sent = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        sent += part
    os.close(ours)
    assert process.wait() == 0
    text = sent.decode()
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", text)]
    return [line for line in drawn if line], text, (folder / "out").read_text()


@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_it_is_one_line_in_a_terminal_with_four_methods_shown(tmp_path: Path, columns: int) -> None:
    script = (
        "import time; from usetta.progress import bar\n"
        "with bar(3669, 'Evaluating', speed=True) as tick:\n"
        "    for i in range(6):\n"
        f"        tick(8, {FOUR!r}); time.sleep(0.12)\n"
        "        if i == 3: print('an answer')\n"
    )
    drawn, sent, printed = in_terminal(script, columns, tmp_path)
    assert not re.search(r"\x1b\[\d*A", sent), "the cursor went up, so there was a second line"
    assert sent.count("\n") == 1
    assert max(map(len, drawn)) <= columns
    assert printed == "an answer\n"
    last = drawn[-1].strip()
    assert re.search(r"48/3", last)
    if columns >= 80:
        assert last.endswith(FOUR)
        assert re.search(r" \d+(\.\d+)?/s 0:0\d:\d\d ", last)
    else:
        assert last.endswith("…")
    assert (columns == 120) == last.startswith("Evaluating ")


@pytest.mark.parametrize("columns", [30, 80])
def test_a_bar_without_a_text_keeps_its_description(tmp_path: Path, columns: int) -> None:
    script = "from usetta.progress import track\nprint(sum(track(range(5), 5, 'Classifying')))\n"
    drawn, sent, printed = in_terminal(script, columns, tmp_path)
    assert re.fullmatch(r"Classifying ━+ 5/5 0:00:00", drawn[-1].rstrip())
    assert sent.count("\n") == 1
    assert printed == "10\n"


def test_a_single_step_spins_and_shows_the_work_inside(tmp_path: Path) -> None:
    script = (
        "import time; from usetta.progress import bar, waiting\n"
        "with waiting('Classifying cat.jpg'):\n"
        "    time.sleep(0.3)\n"
        "    with bar(100000, 'Encoding class names') as tick:\n"
        "        tick(2500, ''); time.sleep(0.3)\n"
    )
    drawn, _, printed = in_terminal(script, 80, tmp_path)
    assert any(re.fullmatch(r". Classifying cat.jpg +0:00:00", line.rstrip()) for line in drawn)
    assert any(re.fullmatch(r". Encoding class names +2500/100000 0:00:00", line.rstrip()) for line in drawn)
    assert printed == ""


def test_where_nobody_watches_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(iter("abc"), 3, "Reading")) == ["a", "b", "c"]
    with bar(10, "Evaluating", speed=True) as tick:
        tick(10, FOUR)
    with bar(10, "Evaluating", shown=False) as tick, waiting("Classifying"):
        tick(10, FOUR)
    assert capsys.readouterr() == ("", "")


def test_one_item_is_not_worth_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    assert list(track([1], 1, "Reading")) == [1]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    be_quiet(True)
    assert list(track([1, 2], 2, "Reading")) == [1, 2]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    be_quiet(False)
    assert list(track([1, 2], 2, "Reading")) == [1, 2]
    assert "2/2" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_speed_of_slow_work_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches that take a minute each: rich by itself forgets what is older than half of one."""
    now = 1000.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    monkeypatch.setenv("COLUMNS", "80")
    with bar(80, "Evaluating", shown=True, speed=True) as tick:
        for _ in range(4):
            now += 64.0
            tick(8, "se 50.0 %")
    assert re.search(r"32/80 0.125/s 0:06:24 se 50.0 %", capsys.readouterr().err)
