"""Datasets that are known by name: the paper's fifteen, and those that other packages add.

A named dataset is a few facts and a function that reads it from a disk. The fifteen (`benchmark`) and a plug-in are the
same kind of thing, so loading, checking, fetching and listing do not distinguish them. Another package adds one by an
entry point of the group `usetta.datasets`, or a script by `register_dataset`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from usetta.data.dataset import AbsentError, DataError, Dataset, Family, Reading, UnknownDatasetError, missing_images
from usetta.data.packed import INDEX, PACKED, read_packed
from usetta.registry import Registry

Reader = Callable[[Path], Dataset | Reading]


@dataclass(frozen=True)
class Archive:
    """A file to download and the folder to take out of it."""

    url: str
    checksum: str | None
    """`md5:...` or `sha256:...` as published; None if nobody published one."""
    member: str
    """The folder inside the archive."""
    target: str
    """Where that folder goes, below the folder of the datasets."""
    within: str = ""
    """The archive inside the archive that holds `member`, if it is one deeper."""
    bytes: int = 0
    """About how many it has, for the plan of a download."""


@dataclass(frozen=True)
class Mirror:
    """A copy on the Hugging Face hub, in Parquet files or WebDataset tars, which are read in place."""

    repo: str
    files: str
    """A pattern that matches the files: `data/test-*.parquet`."""
    bytes: int
    """About how many they have, for the plan of a download."""
    revision: str = "main"
    gated: bool = False
    """Whether the hub gives it only to those who have accepted its terms."""
    same_labels: bool = False
    """Whether its labels count as ours do; else the names of its classes say which is which."""


@dataclass(frozen=True)
class SplitList:
    """The list of a dataset's images, which is downloaded, verified and cached."""

    file: str
    """What layouts call it."""
    blob: str
    """The id that git gives to its content."""
    places: tuple[str, ...]
    """Where it lies on GitHub: `owner/repository/commit/path`, the first that works is taken."""
    url: str
    """Where a browser finds it."""


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from; the archive is tried first, then the mirrors in order, then people."""

    folder: str
    """The dataset's own folder."""
    archive: Archive | None = None
    by_hand: tuple[str, ...] = ()
    """Steps that give the images where nothing else does; `{folder}` stands for the dataset's folder."""
    split: SplitList | None = None
    """The list of the images, where it is not part of the archive."""
    mirrors: tuple[Mirror, ...] = ()
    images: str = ""
    """Where the images go if a mirror is unpacked, below the folder of the datasets."""
    licence: str = ""
    balanced: bool = False
    """Whether all classes have the same number of images, which a mirror without a list is checked for."""


@dataclass(frozen=True)
class NamedDataset:
    """What is known about a dataset before it is read."""

    name: str
    title: str
    """As in tables."""
    family: Family
    images: int
    """How many a complete copy has."""
    classes: int
    reader: Reader
    """Takes the folder that holds all datasets. Files that do not exist may simply raise `FileNotFoundError`."""
    own_reader: Reader | None = None
    """As `reader`, but also takes the dataset's own folder, under any name. By default there is no difference."""
    aliases: tuple[str, ...] = ()
    source: Source | None = None
    """None if it cannot be fetched."""

    def read(self, root: Path, *, own: bool = False) -> Reading:
        """Read it below `root`, or with `own` also from `root` itself, whether or not it is complete.

        Every failure is a `DataError`: one dataset that cannot be read must not end a check of all.
        """
        reader = self.own_reader if own and self.own_reader else self.reader
        packed = self._packed(root, own=own)
        try:
            result = read_packed(packed) if packed else reader(root)
        except DataError:
            raise
        except FileNotFoundError as error:
            raise AbsentError(f"{self.name}: there is no {error.filename or error}") from error
        except (OSError, ValueError, LookupError) as error:  # what readers raise on files that are not as expected
            raise DataError(f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        if isinstance(result, Dataset):
            result = Reading(result, missing_images(result.root, result.ids))
        dataset = replace(result.dataset, name=self.name, title=self.title, family=self.family)
        return replace(result, dataset=dataset)

    def _packed(self, root: Path, *, own: bool) -> Path | None:
        """The folder of its images in packed files, if there is one."""
        folders = [root / self.source.folder] if self.source else []
        places = [folder / PACKED for folder in (*folders, *([root] if own else []))]
        return next((place for place in places if (place / INDEX).is_file()), None)


class DatasetRegistry(Registry[NamedDataset]):
    """Named datasets, which bring their name and aliases along."""

    def register(self, name: str, value: NamedDataset, *aliases: str) -> NamedDataset:
        """Make `value` known under its name and aliases."""
        if not isinstance(value, NamedDataset):  # an entry point may lead to anything
            raise TypeError(f"{name!r} must be a usetta.data.NamedDataset, not a {type(value).__name__}")
        if value.name != name:
            raise ValueError(f"the dataset {value.name!r} cannot be registered as {name!r}")
        return super().register(name, value, *aliases, *value.aliases)


def normalize(name: str) -> str:
    """A name without what people write differently: case and punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


DATASETS = DatasetRegistry("dataset", group="usetta.datasets", normalize=normalize, error=UnknownDatasetError)


def register_dataset(dataset: NamedDataset) -> NamedDataset:
    """Make a dataset known to this process by its name and aliases."""
    return DATASETS.register(dataset.name, dataset)


def list_datasets() -> tuple[NamedDataset, ...]:
    """The datasets that are known by name: first the fifteen in the order of the paper's tables, then plug-ins."""
    return tuple(dataset for _, dataset in DATASETS.items())
