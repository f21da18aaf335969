"""Options that decide where work is done, for the commands that can spread it over processes and machines."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from usetta.distributed import RayEngine, Shard
    from usetta.models import Model

EngineName = Annotated[str, typer.Option("--engine", help="Where the work runs: local, or ray for a Ray cluster.")]
Address = Annotated[
    str, typer.Option("--address", help="Address of the Ray cluster: auto, HOST:PORT, or local for this machine only.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Number of Ray workers. Default: as many as fit.", min=1)
]
CpusPerWorker = Annotated[
    float, typer.Option("--cpus-per-worker", help="CPUs (and threads) of each Ray worker.", min=0.01)
]
GpusPerWorker = Annotated[
    float, typer.Option("--gpus-per-worker", help="GPUs of each Ray worker; 0.25 lets four share one.", min=0)
]
# The variables that torchrun and Slurm set are read by `read_shard`, not by typer: a rank and a world size must come
# from the same launcher, and typer would pick each by itself.
Rank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        help="Number of this process, from 0, if several share the work. Default: as set by torchrun or Slurm.",
        min=0,
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", help="Number of processes that share the work, each started with this command.", min=1
    ),
]


def read_engine(name: str, address: str, workers: int | None, cpus: float, gpus: float) -> "RayEngine | None":
    """The engine of that name; None is this process."""
    from usetta.distributed import RayEngine

    if name == "local":
        return None
    if name != "ray":
        raise ValueError(f"unknown engine {name!r}; known: local, ray")
    return RayEngine(address, workers, cpus, gpus)


def read_shard(rank: int | None, world_size: int | None, engine: "RayEngine | None" = None) -> "Shard":
    """The share of this process, by flags or by the variables of torchrun and Slurm; the whole run without either.

    With Ray the driver does everything: the variables of the Slurm job that it runs in are ignored, flags are refused.
    """
    from usetta.distributed import Shard

    if engine is None:
        return Shard.from_environment(rank, world_size)
    if rank is not None or world_size is not None:
        raise ValueError("--rank and --world-size cannot be combined with --engine ray, which shares the work itself")
    return Shard()


@contextmanager
def answers_alone() -> Iterator[None]:
    """Keep standard output for answers: Ray reports there every worker that died."""
    with redirect_stdout(sys.stderr):
        yield


def loader(name: str, **options: Any) -> "Callable[..., Model]":
    """Loads a model, here or in a worker. Workers start in another folder, so a path is made absolute."""
    from usetta.models import load_model
    from usetta.models.registry import canonical_name

    path = Path(name).expanduser()
    if canonical_name(name) is None and path.exists():
        name = str(path.absolute())
    return partial(load_model, name, **options)


def for_driver(load: "Callable[..., Model]", gpus: float) -> "Callable[[], Model]":
    """The model that workers with GPUs have, for a machine that may have none and only distributes work."""
    return partial(load, device="cpu", for_device="cuda", compiled=False) if gpus else load


def for_workers(load: "Callable[..., Model]", gpus: float) -> "Callable[[], Model]":
    """The same model, on the GPU if workers have one."""
    return partial(load, device="cuda") if gpus else load
