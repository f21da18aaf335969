"""What users read is in the words of the field, and links lead somewhere.

`WORDS` are expressions that the field does not use, each with what to write instead. They are looked for in the README,
the docs, the help of every command, and the docstrings of public names.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

from usetta.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

WORDS = {
    r"\b(pictures?|photographs?)\b": "image",
    r"\bdata sets?\b": "dataset",
    r"\bcertain(ty)?\b": "confident, confidence",
    r"\b(told|tells?|telling)\b": "reported, prints, returns",
    r"\bread-?outs?\b(?<!readout)(?<!readouts)": "readout",
    r"\b(judges?|judged)\b": "reward model",
    r"(?<!by )(?<!other )\bhands?\b|\b(crews?|hires?|hired|bury|buried|stillborn)\b": "worker, pool, replace",
    r"\b(diary|diaries)\b": "log",
    r"\bbulk\b": "batch",
    r"\b(slopes?|descends?)\b": "gradient, optimize",
    r"--(pictures|against|also)\b": "--limit, --baseline, --extra-model",
    r"\bgoes on\b|\bstopped, the same command\b": "rerun the same command to resume",
    r"\bwhat there is\b": "name what is listed",
    r"\blooked at once\b": "the original image only",
    r"\bnobody answers\b": "cannot connect",
}

NAMES = {
    *("Look", "look", "even", "descend", "Tail", "Change", "in_parts", "per_tensor", "Hand", "hire", "Order", "Asked"),
    *("Subject", "Task", "Diary", "Scores", "Lost", "Room", "Line", "Texts", "Wording", "say"),
}
"""Names of classes and functions that were replaced by the field's."""


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command, of its options, and of the commands below it."""
    yield (
        f"{name} --help",
        "\n".join([command.help or "", *(getattr(option, "help", "") or "" for option in command.params)]),
    )
    for below, child in getattr(command, "commands", {}).items():
        yield from helps(child, f"{name} {below}")


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Public modules, classes and functions of the package, and where they are."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield str(path.relative_to(ROOT)), tree
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_the_page_on_the_command_line_names_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("## All commands")[2]
    table = page.partition("```")[0]
    for name, _ in helps(get_command(app), "usetta"):
        *_, command = name.removesuffix(" --help").split()
        assert command == "usetta" or re.search(rf"`[\w ]*\b{command}\b", table), command


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def test_users_read_the_words_of_the_field() -> None:
    texts = {str(path.relative_to(ROOT)): without_code(path.read_text(encoding="utf-8")) for path in PAGES}
    texts |= dict(helps(get_command(app), "usetta"))
    assert len(texts) > 35
    texts |= {where: ast.get_docstring(node) or "" for where, node in definitions()}  # type: ignore[arg-type]
    wrong = [
        f"{where}: {match[0]!r}; write {instead}"
        for where, text in texts.items()
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
        if not (where.startswith("src/usetta/views/") and match[0].startswith("slope"))  # of a shear: geometry
    ]
    assert not wrong, "\n".join(wrong)


def test_names_are_those_of_the_field() -> None:
    assert not [where for where, node in definitions() if getattr(node, "name", "") in NAMES]


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_pages_and_headings(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_navigation_and_every_name_of_the_reference_exists() -> None:
    navigation = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(navigation) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in PAGES if "docs" in path.parts
    )
    names = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(names) > 30
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None) or importlib.import_module(name)
        assert found.__doc__, name
