"""The paper's tables and figures, and what it takes to measure each: methods, datasets, models, seeds, prompts.

What a table takes follows from its rows and columns in `paper`. What a figure takes is told by the paper's captions and
text; it does not tell seeds, and two of them fit its standard deviations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from usetta.evaluate.metrics import FINE_GRAINED, GROUPS, IMAGENET
from usetta.report import paper

_VIT, _RN = "ViT-B-16", "RN50"
_ALL = (*IMAGENET, *FINE_GRAINED)
GAMMAS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = (1, 2, 4, 6)
BETAS = {
    "0": "use:beta=0.0",
    "0.5": "use:beta=0.5",
    "1": "use:beta=1.0",
    "uniform": "use:beta=uniform",
    "adaptive": "use",
}
"""The weak view's weight, in the pseudo-label and in the answer, and the method that has it."""


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure of the paper."""

    name: str
    shows: str
    kind: Literal["accuracy", "std", "efficiency", "size", "figure"]
    methods: tuple[str, ...]
    """In our grammar, in the order of the paper."""
    datasets: tuple[str, ...]
    models: tuple[str, ...] = (_VIT,)
    """Each has a run of its own."""
    seeds: tuple[int, ...] = (0, 1)
    coop: bool = False
    """Whether the prompt starts from CoOp's context, which must be given."""
    ensemble: bool = False
    """Whether the classes are described by the paper's seven templates."""

    @property
    def templates(self) -> tuple[str, ...]:
        """As `ClassPrompts` takes them; none leaves the choice to the context, or to CLIP's own."""
        return ("ensemble",) if self.ensemble else ()


def members_of(column: str) -> list[str]:
    """The datasets that a mean, or a mean of means, is made of; a dataset is made of itself."""
    return [name for member in GROUPS[column] for name in members_of(member)] if column in GROUPS else [column]


def gamma(value: float) -> str:
    """The method USE with that γ."""
    return "use" if value == 0.4 else f"use:gamma={value}"


def steps(method: str, count: int) -> str:
    """A method with that many steps."""
    return method if count == 1 else f"{method}:steps={count}"


def _table(source: paper.PaperTable) -> PaperItem:
    wanted = {name for column in source.columns for name in members_of(column)}
    methods = tuple(row.method for row in source.rows if row.method)
    of_rows = {row.name for row in source.rows}
    return PaperItem(
        name=source.id,
        shows=source.caption,
        kind=source.quantity,  # type: ignore[arg-type]
        methods=methods,
        datasets=tuple(name for name in _ALL if name in (of_rows if source.quantity == "size" else wanted)),
        models=(source.model,) if source.model else (),
        seeds=(0, 1) if methods else (),
        coop=source.coop,
        ensemble=source.ensemble,
    )


def _figures() -> Iterator[PaperItem]:
    yield PaperItem(
        "figure-2",
        "gain over the weak view: strong views, their average with it, and the uniform mean",
        "figure",
        ("clip", "strong", "average", "uniform"),
        FINE_GRAINED,
    )
    yield PaperItem(
        "figure-3", "fixed weights of the weak view, and USE's adaptive one", "figure", (*BETAS.values(),), _ALL
    )
    yield PaperItem(
        "figure-4",
        "how much USE skips, and its accuracy without and with it",
        "figure",
        ("use:skip=false", "use"),
        _ALL,
    )
    yield PaperItem(
        "figure-5",
        "the weak view and the most confident strong ones of some images",
        "figure",
        ("se",),  # the views are written down by any method that looks at them
        ("imagenet", "pets", "eurosat", "food101"),
        seeds=(0,),
    )
    yield PaperItem(
        "figure-6",
        "tuning in several steps",
        "figure",
        tuple(steps(method, count) for method in ("tpt", "use") for count in STEPS),
        ("dtd", "eurosat", "imagenet-v2"),
    )
    yield PaperItem(
        "figure-7", "USE with other values of γ", "figure", (*map(gamma, GAMMAS),), _ALL, models=(_VIT, _RN)
    )


ITEMS: dict[str, PaperItem] = {
    item.name: item for item in (*(_table(each) for each in paper.tables() if each.id != "text"), *_figures())
}
"""By name, tables first, in the order of the paper. Table 14 lists templates, so there is nothing to measure."""


def get(name: str) -> PaperItem:
    """The item of that name; spelling does not matter: `Table 3`, `fig. 2`."""
    kind, digits = name.strip().lower()[:1], "".join(filter(str.isdigit, name))
    written = f"{ {'t': 'table', 'f': 'figure'}.get(kind, '') }-{digits}"
    if written not in ITEMS:
        raise ValueError(
            f"the paper has nothing to measure that is called {name!r}; `usetta reproduce` lists what it has"
        )
    return ITEMS[written]
