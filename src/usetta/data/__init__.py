"""Datasets: the paper's fifteen and others by name, any folder of class folders, any list of images.

To the rest of the library a dataset is a `Dataset`, however it was read.
"""

from usetta.data import benchmark as benchmark  # importing it registers the fifteen
from usetta.data.dataset import AbsentError, DataError, Dataset, DatasetItem, Reading, UnknownDatasetError, class_name
from usetta.data.fetching import Fetched, fetch
from usetta.data.load import Report, check, load_dataset, load_datasets
from usetta.data.named import Archive, NamedDataset, Source, list_datasets, register_dataset
from usetta.data.own_images import read_folder, read_list

__all__ = [
    "AbsentError",
    "Archive",
    "DataError",
    "Dataset",
    "DatasetItem",
    "Fetched",
    "NamedDataset",
    "Reading",
    "Report",
    "Source",
    "UnknownDatasetError",
    "check",
    "class_name",
    "fetch",
    "list_datasets",
    "load_dataset",
    "load_datasets",
    "read_folder",
    "read_list",
    "register_dataset",
]
