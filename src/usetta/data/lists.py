"""The lists of the nine datasets whose split is CoOp's: downloaded from GitHub, verified and cached.

Several repositories with a licence hold the same nine files, byte by byte. Each is taken at a fixed commit, and the id
that git gives to the content decides whether a file is the right one, so it does not matter who served it.
"""

from collections.abc import Callable
from pathlib import Path

from usetta.data.dataset import DataError
from usetta.data.download import checksums, download, github_address, verify
from usetta.data.named import SplitList
from usetta.files import cache_dir, write_atomically


def cached_list(split: SplitList, log: Callable[[str], object] = lambda text: None) -> Path:
    """The list in the cache, where it is put if it is not there or not the right one."""
    file = cache_dir() / "lists" / split.file
    if file.is_file() and checksums(file, "blob")["blob"] == split.blob:
        return file
    problems = []
    for place in split.places:
        url = f"{github_address()}/{place}"
        log(f"downloading {url}")
        try:
            download(url, file, progress=False)
            verify(file, url, f"blob:{split.blob}")
        except DataError as error:
            log(str(error))
            problems.append(error.problem)
        else:
            return file
    raise DataError(
        f"{split.file} cannot be downloaded: {'; '.join(dict.fromkeys(problems))}",
        f"try again later, or download it from {split.url} into the dataset's folder",
    )


def put_list(split: SplitList, folder: Path, log: Callable[[str], object]) -> None:
    """Put the list into the folder of its dataset."""
    write_atomically(folder / split.file, cached_list(split, log).read_bytes())
