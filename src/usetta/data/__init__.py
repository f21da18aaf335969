"""Datasets: the paper's fifteen, any folder of class folders, any list of images.

To the rest of the library a dataset is a `Dataset`, however it was read.
"""

from usetta.data.benchmark import Benchmark, list_datasets
from usetta.data.checking import Report, check
from usetta.data.dataset import DataError, Dataset, DatasetItem, UnknownDatasetError
from usetta.data.fetching import Fetched, fetch
from usetta.data.registry import load_dataset, load_datasets

__all__ = [
    "Benchmark",
    "DataError",
    "Dataset",
    "DatasetItem",
    "Fetched",
    "Report",
    "UnknownDatasetError",
    "check",
    "fetch",
    "list_datasets",
    "load_dataset",
    "load_datasets",
]
