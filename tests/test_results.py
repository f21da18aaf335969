"""The results that README and docs state are those of the rows in results."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("pyarrow")
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_rows(tool: ModuleType, tmp_path: Path) -> None:
    written = ["README.md", "docs/results.md", "src/usetta/report/imagenet_results.json"]
    for name in (*written, "docs/images/results.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(tool.replaced(text, "results", ""), encoding="utf-8")
    tool.write(tmp_path)
    for name in written:
        assert (tmp_path / name).read_text("utf-8") == (ROOT / name).read_text("utf-8"), f"{name}: run make results"
    assert (tmp_path / "docs/images/results.png").stat().st_size > 1000


def test_every_number_of_the_readme_follows_from_the_rows() -> None:
    """Counted here without the code that wrote them; the intervals are bootstrapped, so only their ends' order is."""
    seconds = json.loads((ROOT / "results/costs.json").read_text(encoding="utf-8"))["seconds"]
    parquet = pytest.importorskip("pyarrow.parquet")
    right: dict[str, dict[str, bool]] = {}
    for row in parquet.read_table(ROOT / "results/imagenet.parquet").to_pylist():
        if row["seed"] == 0:
            right.setdefault(row["method"], {})[row["image"]] = row["label"] == row["prediction"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    gains = r"(?:–|\**([+−][\d.]+) \((\S+) … (\S+)\)\**)"
    costs = r"([\d.]+) × \| ([\d.]+) × \|"
    lines = re.findall(rf"^\| `([\w+-]+)` \| ([\d.]+) % \| {gains} \| [^|]* \| {costs}", readme, re.M)
    assert [line[0] for line in lines][:1] == ["clip"]
    assert len(lines) >= 4
    assert f"{len(right['clip'])} images" in readme
    for method, accuracy, gain, low, high, over_clip, over_views in lines:
        assert float(over_clip) == round(seconds[method] / seconds["clip"])
        assert float(over_views) == pytest.approx(seconds[method] / seconds["CLIP-64"], abs=0.0051)
        common = right[method].keys() & right["clip"].keys()
        share = 100 * sum(right[method].values()) / len(right[method])
        assert float(accuracy) == pytest.approx(share, abs=0.051)
        if gain:
            change = 100 * sum(right[method][image] - right["clip"][image] for image in common) / len(common)
            estimate, first, last = (float(text.replace("−", "-")) for text in (gain, low, high))
            assert estimate == pytest.approx(change, abs=0.051)
            assert first < estimate < last
