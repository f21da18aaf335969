"""Options that say where work is done, for the commands that can do it on a cluster."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from usetta.distributed import RayEngine
    from usetta.models import Model

EngineName = Annotated[str, typer.Option("--engine", help="Where work is done: local, or ray for a Ray cluster.")]
Address = Annotated[
    str, typer.Option("--address", help="Of the Ray cluster: auto, host:port, or local for this machine alone.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Workers on the cluster; by default all it holds.", min=1)
]
CpusPerWorker = Annotated[float, typer.Option("--cpus-per-worker", help="CPUs, and threads, of a worker.", min=0.01)]
GpusPerWorker = Annotated[float, typer.Option("--gpus-per-worker", help="GPUs of a worker: 0.25 shares one.", min=0)]


def read_engine(name: str, address: str, workers: int | None, cpus: float, gpus: float) -> "RayEngine | None":
    """The engine of that name; None is this process."""
    from usetta.distributed import RayEngine

    if name == "local":
        return None
    if name != "ray":
        raise ValueError(f"unknown engine {name!r}; known are local and ray")
    return RayEngine(address, workers, cpus, gpus)


@contextmanager
def answers_alone() -> Iterator[None]:
    """Keep standard output for answers: Ray tells there of every worker that died."""
    with redirect_stdout(sys.stderr):
        yield


def loader(name: str, **options: Any) -> "Callable[..., Model]":
    """Loads a model here or in a worker, which knows nothing of the folder that the command was given in."""
    from usetta.models import load_model
    from usetta.models.registry import canonical_name

    path = Path(name).expanduser()
    if canonical_name(name) is None and path.exists():
        name = str(path.absolute())
    return partial(load_model, name, **options)


def for_workers(load: "Callable[..., Model]", gpus: float) -> "Callable[[], Model]":
    """The same model, on the GPU where workers have one."""
    return partial(load, device="cuda") if gpus else load
