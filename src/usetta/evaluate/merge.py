"""One run out of its shards: the stores that processes without Ray wrote, each for its share of the work.

A sharded run keeps a store per process in `RUN/shards/RANK-of-WORLD`, because several machines cannot write to one
SQLite database. Merging copies them into the store of `RUN`. It can be killed and repeated at any time: a row that was
copied is not copied again. Shards may still be at work only if they are on this machine.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from usetta.distributed import Shard
from usetta.evaluate.store import FILE, Store, StoreError
from usetta.evaluate.writing import only_writer

FOLDER = "shards"
_NAME = re.compile(r"(\d+)-of-(\d+)")
_CALLS = "invocation"
"""Calls of the program are numbered in each store, so they need another name in the merged one."""
_NOTES = ("classes", "root")
"""Facts that may differ between machines, such as where a dataset lies; all other kinds must agree."""


@dataclass(frozen=True)
class MergeSummary:
    """What a call of `merge_shards` did."""

    shards: int
    missing: tuple[str, ...]
    """Names of the shards that are not there."""
    new_rows: int
    failed: int
    """Images that could not be read, in the merged run."""


def shard_folder(run: Path, shard: Shard) -> Path:
    """Where a process keeps its part of a run; the run itself if there is only one process."""
    return run if shard.is_whole else run / FOLDER / shard.name


def merge_shards(
    run: Path, log: Callable[[str], object] = lambda text: None, *, allow_missing: bool = False
) -> MergeSummary:
    """Copy the results of all shards into the run directory.

    Shards whose facts (model, views, datasets, recipes) differ are refused before any row is copied. So is a run
    with missing shards, unless `allow_missing`: its tables would silently be those of fewer images.
    """
    folders, missing = find_shards(run)
    if missing and not allow_missing:
        raise StoreError(f"{run}: these shards are missing: {', '.join(missing)}. Compute them, or use --allow-missing")
    new_rows = 0
    with only_writer(run), Store(run) as merged:
        for folder in folders:
            _copy_facts(folder, merged)
        for folder in folders:
            copied = merged.copy_from(folder)
            new_rows += copied
            log(f"{folder.name}: {copied} new rows")
        failed = len(merged.failed_images())
    return MergeSummary(len(folders), missing, new_rows, failed)


def find_shards(run: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The folders of a run's shards that have results, and the names of those that are missing.

    After a change of the world size there are folders of several worlds. Nothing is missing if one world is complete.
    """
    shards = []
    for path in (run / FOLDER).glob("*"):
        name = _NAME.fullmatch(path.name)
        if name and (path / FILE).is_file():
            shards.append(Shard(int(name[1]), int(name[2])))
    if not shards:
        raise StoreError(f"there are no shards in {run / FOLDER}; `usetta eval --rank R --world-size W` makes them")
    shards.sort(key=lambda shard: (shard.world_size, shard.rank))
    missing_by_world = [
        tuple(shard.name for rank in range(size) if (shard := Shard(rank, size)) not in shards)
        for size in {shard.world_size for shard in shards}
    ]
    return [shard_folder(run, shard) for shard in shards], min(missing_by_world, key=len)


def _copy_facts(folder: Path, merged: Store) -> None:
    with Store(folder, create=False) as store:
        facts = {kind: store.facts(kind) for kind in store.kinds()}
    fixed = [kind for kind in facts if kind not in (*_NOTES, _CALLS)]
    try:
        merged.fix_all((kind, name, value) for kind in fixed for name, value in facts[kind].items())
    except StoreError as error:
        raise StoreError(f"the shard {folder.name} does not belong to this run: {error}") from None
    for kind in facts.keys() & {*_NOTES, _CALLS}:
        for name, value in facts[kind].items():
            merged.note(kind, f"{folder.name}/{name}" if kind == _CALLS else name, value)
