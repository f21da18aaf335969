"""How results get into a run: by one process at a time, at least every few seconds, and with what they were made of.

Two processes that write into one run would both compute everything. So a run has a lock, which the system releases when
its holder ends, however it ends; who holds it is written beside it, for the message to the other. The content of an
image is part of what its results depend on: a file of the same name with another content is answered again.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from usetta.data import Dataset
from usetta.evaluate.run_log import RunLog, RunningAccuracy
from usetta.evaluate.store import FailedImage, FileContent, ResultRow, ShownViews, Store, StoreError
from usetta.evaluate.worker import DatasetJob, Outcome, WorkItem
from usetta.files import write_atomically
from usetta.images import ImageError, file_digest

_LOCK, _WRITER = ".lock", ".writer.json"
_SECONDS = 1.0
"""Time after which results are saved. A transaction for every image would take longer than a cached one."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Within it no other process writes into the run; StoreError if one does, and who it is."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = ""
        with suppress(OSError, ValueError, KeyError):
            writer = json.loads((folder / _WRITER).read_text(encoding="utf-8"))
            holder = f", process {writer['pid']} on {writer['host']}"
        raise StoreError(
            f"another process writes into {folder}{holder}: wait until it is done, or choose another directory"
        ) from None
    try:
        write_atomically(folder / _WRITER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        yield
    finally:
        (folder / _WRITER).unlink(missing_ok=True)
        lock.release()


def forget_changed(dataset: Dataset, stores: Iterable[Store], log: Callable[[str], object]) -> None:
    """Remove the results of images whose files have another content than when they were answered."""
    for store in stores:
        known = store.contents(dataset.name)
        touched, changed = {}, []
        for image, old in known.items():
            new = file_content(dataset.root / image, old)
            if new is None or new == old:
                continue
            if new.digest == old.digest:
                touched[image] = new
            else:
                changed.append(image)
        store.note_contents(dataset.name, touched)
        if changed:
            store.forget(dataset.name, changed)
            examples = ", ".join(changed[:3])
            log(f"{dataset.name}: {len(changed)} images have changed since they were answered: {examples}")


def file_content(path: Path, known: FileContent | None = None) -> FileContent | None:
    """What the file is now; None if there is none. It is read unless it has the size and time of the `known` one."""
    try:
        status = path.stat()
        if known is not None and (status.st_size, status.st_mtime_ns) == (known.size, known.mtime):
            return known
        return FileContent(status.st_size, status.st_mtime_ns, file_digest(path))
    except (OSError, ImageError):
        return None


class ResultWriter:
    """Writes the outcomes of work items to the store of a run, those of about a second together."""

    def __init__(
        self, store: Store, jobs: Mapping[str, DatasetJob], run_log: RunLog, accuracy: RunningAccuracy
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._run_log = run_log
        self._accuracy = accuracy
        self._waiting: list[tuple[WorkItem, Outcome]] = []
        self._saved = time.monotonic()

    def add(self, item: WorkItem, outcome: Outcome) -> None:
        """Take the outcome of an item."""
        if self._waiting and _place(self._waiting[0][0]) != _place(item):
            self.close()  # accuracies start from what is in the store
        self._accuracy.add(item, outcome)
        self._waiting.append((item, outcome))
        if not 0 <= time.monotonic() - self._saved < _SECONDS:
            self.close()

    def close(self) -> None:
        """Save what has not been saved yet."""
        waiting, self._waiting = self._waiting, []
        self._saved = time.monotonic()
        if not waiting:
            return
        rows: list[ResultRow] = []
        shown: list[ShownViews] = []
        failed: list[FailedImage] = []
        for item, outcome in waiting:
            rows += outcome.rows
            shown += outcome.shown
            failed += outcome.failed
            self._run_log.count(item, outcome)
        job = self._jobs[waiting[0][0].dataset]
        contents = {row.image: file_content(job.dataset.root / row.image) for row in rows}
        known = {image: content for image, content in contents.items() if content is not None}
        self._store.note_contents(job.dataset.name, known)
        self._store.add(rows, shown, failed)
        self._run_log.save()


def _place(item: WorkItem) -> tuple[str, int, int]:
    return item.dataset, item.seed, item.order_seed
