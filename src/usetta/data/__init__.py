"""Datasets: the paper's fifteen and others by name, any folder of class folders, any list of images.

To the rest of the library a dataset is a `Dataset`, however it was read.
"""

from usetta.data import benchmark as benchmark  # importing it registers the fifteen
from usetta.data.dataset import AbsentError, DataError, Dataset, DatasetItem, Reading, UnknownDatasetError, class_name
from usetta.data.fetching import Fetched, PlannedFetch, fetch, fetch_all, import_dataset, plan_fetch
from usetta.data.load import Report, check, load_dataset, load_datasets
from usetta.data.named import Archive, Mirror, NamedDataset, Source, SplitList, list_datasets, register_dataset
from usetta.data.own_images import read_folder, read_list

__all__ = [
    "AbsentError",
    "Archive",
    "DataError",
    "Dataset",
    "DatasetItem",
    "Fetched",
    "Mirror",
    "NamedDataset",
    "PlannedFetch",
    "Reading",
    "Report",
    "Source",
    "SplitList",
    "UnknownDatasetError",
    "check",
    "class_name",
    "fetch",
    "fetch_all",
    "import_dataset",
    "list_datasets",
    "load_dataset",
    "load_datasets",
    "plan_fetch",
    "read_folder",
    "read_list",
    "register_dataset",
]
