"""Sharing out a run between processes that know nothing of each other, for people without Ray.

Every process runs the same command and takes each `world_size`-th work item. Items are dealt by their position in the
whole stream, never by what is already done: so a process that is restarted gets the very same items again, and no two
processes ever share one.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Self, TypeVar

T = TypeVar("T")

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "Slurm": ("SLURM_PROCID", "SLURM_NTASKS")}
"""Variables that launchers set for each of the processes they start, in this order of preference."""


@dataclass(frozen=True)
class Shard:
    """The share of one process: the items at the positions rank, rank + world_size, rank + 2 · world_size, …"""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the world size must be at least 1, not {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is out of range: with world size {self.world_size}, "
                f"ranks go from 0 to {self.world_size - 1}"
            )

    @classmethod
    def from_environment(
        cls, rank: int | None = None, world_size: int | None = None, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """The shard given explicitly, else the one set by torchrun or Slurm, else the whole run.

        Rank and world size come from the same launcher: a rank of torchrun means nothing in the world of Slurm.
        """
        if rank is not None or world_size is not None:
            return cls(*_pair("--rank", rank, "--world-size", world_size))
        for launcher, names in LAUNCHERS.items():
            # A batch script of Slurm has the variables as well (rank 0 of all tasks), but it runs only once: sharing
            # out is meant only for the steps that `srun` starts.
            if launcher == "Slurm" and "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
                continue
            values = [_read_number(name, environment) for name in names]
            if values != [None, None]:
                return cls(*_pair(names[0], values[0], names[1], values[1]))
        return cls()

    @property
    def is_whole(self) -> bool:
        """Whether this process does everything."""
        return self.world_size == 1

    @property
    def name(self) -> str:
        """Names the folder of this shard in a run directory."""
        return f"{self.rank}-of-{self.world_size}"

    def take(self, items: Iterable[T]) -> Iterator[T]:
        """The items of this shard, lazily."""
        return islice(items, self.rank, None, self.world_size)


def _pair(rank_name: str, rank: int | None, size_name: str, size: int | None) -> tuple[int, int]:
    if rank is None or size is None:
        given, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
        raise ValueError(f"{given} is set but {missing} is not; give both or neither")
    return rank, size


def _read_number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name} should be a whole number, not {text!r}")
    return int(text)
