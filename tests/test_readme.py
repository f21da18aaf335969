"""What the README says is compared with the code; test_typed.py types its commands."""

import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import usetta
from usetta import Recipe, methods

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_both_commands_and_they_exist() -> None:
    shown = [shlex.split(line, comments=True) for line in re.findall(r"^\$ (make .*)$", README, flags=re.MULTILINE)]
    assert shown == [["make", "demo"], ["make", "test"]]
    for program, target in shown:
        assert subprocess.run([program, "--dry-run", target], cwd=ROOT, capture_output=True, check=True).stdout


def test_the_readme_is_in_the_order_that_people_expect() -> None:
    headings = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert headings[:3] == ["Install", "Quick start", "Results"]
    assert headings[-3:] == ["Documentation", "Citation", "Licence"]
    assert README.index("![") < README.index("## Install")


def test_the_readme_names_every_method() -> None:
    table = README.partition("## Methods")[2].partition("\n## ")[0]
    assert set(methods.names()) <= set(re.findall(r"`([^`]+)`", table))
    for name in re.findall(r"`([^`]+)`", table):
        assert methods.get(name)


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page.partition("| setting |")[2], flags=re.MULTILINE))
    settings = [field for field in fields(Recipe) if field.name not in ("name", "description", "options")]
    assert listed == {field.name: str(field.default).lower() for field in settings}
    for name, default in listed.items():
        assert methods.get(f"se:{name}={default}") == methods.get("se")


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {usetta.__version__}\n" in citation
