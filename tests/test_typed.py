"""Every command and every Python block of the README and the docs is typed in a fresh virtual environment.

The environment is made from the built wheel (`fresh`), without the Makefile. Commands run in the order of the pages,
in one folder that holds what a reader has: labelled images and small copies of two datasets. `NOT_TYPED` lists what is
left out, with the reason. The quick start of the README also runs with the embedded model.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import usetta
from conftest import make_image
from data.miniature import SPLITS
from fresh import REPOSITORY, ROOT, FreshEnvironment
from usetta.models import embedded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fresh environment")]

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}

NOT_TYPED = {
    r"make (demo|test)$": "needs a clone; test_readme.py checks that the targets exist, and CI runs them",
    r"pip install": "needs a package index",
    r"usetta models pull ViT": "downloads from a model hub",
    r"usetta data fetch": "downloads from the authors' pages; tests/data has a server of its own",
    r"usetta data import": "needs files of other libraries; tests/data/test_objects.py makes some",
    r"usetta reproduce all": "downloads all datasets; tests/data/test_reproduce_all.py has a server of its own",
    r"usetta demo": "takes minutes; tests/test_demo.py",
    r"usetta bench": "takes minutes; tests/test_bench.py",
    r"usetta .*--engine ray": "needs a Ray cluster; tests/distributed starts one",
    r"ray (start|stop)": "starts a Ray cluster; tests/distributed does so too",
    r"docker ": "needs Docker",
    r"usetta serve|USETTA_API_KEYS=|curl ": "needs a running server; tests/serve/test_docs.py has one",
}
"""Commands that are not typed here, and why."""

NOT_RUN = {
    "docs/serving.md": "needs a running server; tests/serve/test_docs.py has one",
    "docs/models.md": "is a file and a script; tests/models/test_base.py",
    "docs/data.md": "is a file that adds a dataset; tests/data/test_named.py",
    "docs/methods.md": "is a file that adds a method; tests/test_docs.py",
}
"""Pages whose Python is run elsewhere."""


def commands(page: str) -> list[str]:
    """The commands of a page in order; the prompt may name a machine (`head$`), a comment at the end is cut off."""
    lines = [
        line
        for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert all(re.match(r"\w*\$ ", line) for line in lines), lines
    return [re.sub(r"\s+# .*", "", line.partition("$ ")[2]).strip() for line in lines]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def reason_not_to_type(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_TYPED.items() if re.match(pattern, command)), None)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshEnvironment]:
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    yield environment
    environment.close()


def lay_out(folder: Path) -> Path:
    """What a reader has: images in a folder for each class, and two datasets of the paper."""
    for number, name in enumerate(("red fox", "tabby cat")):
        for shot in range(2):
            path = folder / "labelled" / name / f"{shot}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            make_image(2 * number + shot).save(path)
    for name, split in (("dtd", "DescribableTextures"), ("pets", "OxfordPets")):
        rows, images, _ = SPLITS[name]
        for number, (path, _, _) in enumerate(rows):
            (folder / "data" / images / path).parent.mkdir(parents=True, exist_ok=True)
            make_image(number).save(folder / "data" / images / path)
        (folder / "data" / f"split_zhou_{split}.json").write_text(json.dumps({"test": rows}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, fresh: FreshEnvironment, tiny_checkpoint: Path) -> Path:
    """The folder in which all commands are typed."""
    folder = lay_out(tmp_path_factory.mktemp("desk"))
    fresh.type("usetta sample", folder, tiny_checkpoint)
    (folder / "cat.png").write_bytes((folder / "sample" / "cat.jpg").read_bytes())
    return folder


@pytest.fixture(scope="module")
def typed() -> set[str]:
    """Commands that were typed already: several pages begin with the same ones."""
    return set()


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_the_commands_of_a_page(
    name: str, fresh: FreshEnvironment, desk: Path, typed: set[str], tiny_checkpoint: Path
) -> None:
    for block in python_blocks(PAGES[name]):
        if file := re.match(r"# (\w+\.py)\n", block):  # scripts that the commands name
            (desk / file[1]).write_text(block, encoding="utf-8")
    for command in commands(PAGES[name]):
        if reason_not_to_type(command) or command in typed:
            continue
        if "pull embedded" in command and not embedded.is_cached():
            continue  # nor is there a network to fetch it
        done = fresh.type(command, desk, tiny_checkpoint)
        assert done.code == 0, f"{command}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if "--out" in command:
            out = desk / re.findall(r"--out (\S+)", command)[0]
            assert out.is_dir() or out.stat().st_size > 1000, command
        typed.add(command)


def test_only_what_has_a_reason_is_left_out() -> None:
    everything = [command for page in PAGES.values() for command in commands(page)]
    for pattern in NOT_TYPED:
        assert any(re.match(pattern, command) for command in everything), f"no command is like {pattern}"
    assert sum(not reason_not_to_type(command) for command in everything) >= 40


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if python_blocks(page) and name not in NOT_RUN])
def test_the_python_of_a_page(name: str, fresh: FreshEnvironment, tmp_path: Path, tiny_checkpoint: Path) -> None:
    fresh.type("usetta sample", lay_out(tmp_path), tiny_checkpoint)
    (tmp_path / "page.py").write_text("\n".join(python_blocks(PAGES[name])), encoding="utf-8")
    done = fresh.type("python page.py", tmp_path, tiny_checkpoint)
    assert done.code == 0, done.stderr


@pytest.fixture
def embedded_model() -> None:
    if not embedded.is_cached():
        pytest.skip("the embedded model was not fetched (`usetta models pull embedded`)")


@pytest.mark.usefixtures("embedded_model")
def test_the_quick_start_with_the_real_model(fresh: FreshEnvironment, tmp_path: Path) -> None:
    where = fresh.shell("python -c 'import usetta; print(usetta.__file__)'", tmp_path)
    assert str(fresh.home) in where.stdout
    readme = PAGES["README.md"]
    sample, classify = [command for command in commands(readme) if command.startswith("usetta ")][:2]
    assert fresh.shell(sample, tmp_path).code == 0
    done = fresh.shell(classify, tmp_path)
    assert done.code == 0, done.stderr
    assert "tabby cat" in done.stdout
    (block,) = python_blocks(readme)
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    (tmp_path / "quick.py").write_text(block, encoding="utf-8")
    done = fresh.shell("python quick.py", tmp_path)
    assert done.stdout.startswith("tabby cat"), done.stderr


def test_the_notebook(fresh: FreshEnvironment, tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Its cells run one after the other, as in Jupyter, which is not needed for that: `!` lines go to the shell."""
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    source = "\n".join("".join(cell["source"]) for cell in cells)
    script = re.sub(
        r"^!(.*)$", r"__import__('subprocess').run('\1', shell=True, check=True)", source, flags=re.MULTILINE
    )
    (tmp_path / "notebook.py").write_text(script, encoding="utf-8")
    done = fresh.type("python notebook.py", tmp_path, tiny_checkpoint)
    assert done.code == 0, done.stderr
    assert re.search(r"^tpt\+se +(tabby|Egyptian|tiger) cat", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^sample/rocket.jpg .*%$", done.stdout, re.MULTILINE), done.stdout


def test_the_packages_are_ready_for_an_upload(fresh: FreshEnvironment) -> None:
    files = sorted(fresh.packages.iterdir())
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (wheel,) = fresh.packages.glob("*.whl")
    with ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
        (sbom,) = [name for name in archive.namelist() if "/sboms/" in name]
        bill = json.loads(archive.read(sbom))
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", usetta.__version__)
    required = {part["name"] for part in bill["components"] if part.get("scope") == "required"}
    assert required == {
        re.match(r"[\w.-]+", line)[0] for line in fields.get_all("Requires-Dist", []) if "extra" not in line
    }  # type: ignore[index]
    assert fields["Version"] == usetta.__version__
    assert f"Repository, {REPOSITORY}" in fields.get_all("Project-URL", [])
    description = fields.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert len(links) > 20
    assert all(link.startswith(f"{REPOSITORY}/") for link in links), links
    assert f"]({REPOSITORY}/raw/HEAD/docs/images/explain.jpg)" in description
    extras = {*fields.get_all("Provides-Extra", [])}
    named = {
        extra
        for page in PAGES.values()
        for group in re.findall(r"usetta\[([\w,]+)\]", page)
        for extra in group.split(",")
    }
    assert named <= extras
