"""What `reproduce` and `reproduce all` share: which datasets are there, where a run goes, and measuring it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from usetta.cli.app import counted, echo, note, warn
from usetta.cli.engines import answers_alone, for_driver, for_workers, loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from usetta.data import Dataset
    from usetta.distributed import RayEngine
    from usetta.evaluate.runner import EvalSummary
    from usetta.models import Model
    from usetta.report.reproduce import PaperItem


class Measuring:
    """Computes what runs lack, with the options that all of them share."""

    def __init__(
        self,
        precision: str,
        device: str,
        limit: int | None,
        protocol: str,
        context: Path | None,
        cache: Path | None,
        engine: "RayEngine | None",
    ) -> None:
        self.precision, self.device, self.limit, self.protocol = precision, device, limit, protocol
        self.context, self.cache, self.engine = context, cache, engine
        self._loaded: tuple[str, Model] | None = None

    def load(self, name: str) -> "Model":
        """The model of that name; the last one is kept, because the next run usually has the same."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            self._loaded = name, for_driver(self._loader(name), self._gpus)()
        return self._loaded[1]

    @property
    def _gpus(self) -> float:
        return self.engine.gpus if self.engine else 0

    def _loader(self, name: str) -> "Callable[..., Model]":
        return loader(name, precision=self.precision, device=self.device)

    def measure(
        self,
        item: "PaperItem",
        methods: "Sequence[str]",
        sets: "Sequence[Dataset]",
        model_name: str,
        out: Path,
        seeds: tuple[int, ...],
    ) -> "EvalSummary | None":
        """Compute what the run in `out` lacks of the answers of methods, if anything; prompts are those of `item`."""
        from dataclasses import replace

        from usetta.evaluate.runner import EvalSettings, evaluate
        from usetta.evaluate.store import FILE, Store
        from usetta.report.reproduce import missing_results

        sizes = {dataset.name: min(len(dataset), self.limit or len(dataset)) for dataset in sets}
        if (out / FILE).is_file():
            asked = replace(item, methods=tuple(methods), datasets=tuple(sizes))
            with Store(out) as store:
                if not missing_results(asked, store, seeds=seeds, images=sizes):
                    return None
        model = self.load(model_name)
        parts = (f"{name} ({counted(size, 'image')})" for name, size in sizes.items())
        note(f"model: {model.name}, {', '.join(parts)}")
        context = self.context if item.coop else None
        try:
            with answers_alone():
                return evaluate(
                    model,
                    sets,
                    _possible(methods, model),
                    out,
                    EvalSettings(templates=item.templates, context=context),
                    seeds=seeds,
                    limit=self.limit,
                    cache=self.cache,
                    engine=self.engine,
                    load=for_workers(self._loader(model_name), self._gpus),
                    log=note,
                )
        except KeyboardInterrupt:
            echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
            raise typer.Exit(130) from None


def present_datasets(names: "Sequence[str]", data: Path | None, protocol: str) -> "list[Dataset]":
    """The datasets that are there; the others are reported."""
    from usetta.data import DataError
    from usetta.data.dataset import AbsentError, NoListError
    from usetta.data.named import DATASETS
    from usetta.data.protocols import apply_protocol

    if data is None:
        note("no --data given, so nothing is measured")
        return []
    root = data.expanduser().absolute()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder" if root.exists() else f"{root} does not exist")
    present, absent = [], []
    for name in names:
        try:
            reading = DATASETS.get(name).read(root)
        except (AbsentError, NoListError):
            absent.append(name)
        except DataError as error:
            warn(f"left out: {error}")
        else:
            if reading.missing:
                warn(f"left out: {name} is incomplete; the first missing file is {reading.missing[0]}")
            else:
                present.append(apply_protocol(reading.dataset, protocol))
    if absent:
        note(f"not in {data}: {', '.join(absent)} (see `usetta data check`)")
    return present


def run_folder(item: "PaperItem", model: str, out: Path | None, *, alone: bool, base: Path = Path("runs")) -> Path:
    """The directory of a run; what must not be mixed with other prompts or models has one of its own."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    if out is not None:
        return out if alone else out / name
    return base / f"paper-{name}{'-coop' if item.coop else '-ensemble' if item.ensemble else ''}"


def _possible(names: "Sequence[str]", model: "Model") -> list[str]:
    """The methods that a model can run; the others are reported."""
    from usetta import methods
    from usetta.models.base import require_last_blocks

    try:
        require_last_blocks(model)
    except ValueError as error:
        without = [method for method in names if methods.get(method).needs_hidden]
        if without:
            warn(f"left out: {', '.join(without)}; {error}")
        return [method for method in names if method not in without]
    return list(names)
