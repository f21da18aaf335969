"""How published benchmarks read a dataset, where that differs from its list.

The paper's benchmark, tta-vlm, has the class names of the lists but for two, as far as they could be compared (not
those of SUN397 and Aircraft): its names of Food101, which are TPT's, have `cheesecake` before `cheese_plate`, and
CoOp's list of images has them the other way round. So the images of these two classes, 600 of 30 300, are scored
against each other's name.
"""

from dataclasses import replace

from usetta.data.dataset import Dataset
from usetta.registry import suggest

DEFAULT_PROTOCOL = "lists"
_RENAMED: dict[str, dict[str, dict[int, tuple[str, str]]]] = {
    DEFAULT_PROTOCOL: {},
    "tta-vlm": {"food101": {16: ("cheese plate", "cheesecake"), 17: ("cheesecake", "cheese plate")}},
}
"""By protocol, dataset and label: the name in the list, and the name in the benchmark."""
PROTOCOLS = tuple(_RENAMED)


def apply_protocol(dataset: Dataset, protocol: str) -> Dataset:
    """The dataset with the class names that a benchmark gives it."""
    if protocol not in _RENAMED:
        raise ValueError(f"unknown protocol {protocol!r}; {suggest(protocol, PROTOCOLS)}")
    classes = list(dataset.classes)
    for label, (listed, renamed) in _RENAMED[protocol].get(dataset.name, {}).items():
        if dataset.family != "other" and label < len(classes) and dataset.classes[label] == listed:
            classes[label] = renamed
    return replace(dataset, classes=tuple(classes))


def protocol_note(dataset: str, classes: tuple[str, ...], *, paper: bool) -> str | None:
    """What a table must say about the class names of a run: that they differ from the paper's, or from the list's."""
    for label, (listed, renamed) in _RENAMED["tta-vlm"].get(dataset, {}).items():
        if label < len(classes) and classes[label] == renamed:
            return f"the names {listed!r} and {renamed!r} exchanged, as the benchmark tta-vlm has them"
        if label < len(classes) and classes[label] == listed and paper:
            return f"the paper's numbers are for the names {listed!r} and {renamed!r} exchanged, see Footguns"
    return None
