"""Any folder that holds a folder of images for each class.

Classes are in the order of their folders' names. A folder without images is an error rather than a class: it is more
often something that does not belong there than a class nobody has an image of, and it would change every answer.
"""

from pathlib import Path

from usetta.data.dataset import DataError, Dataset, class_name
from usetta.images import ImageError, find_images

_PARTS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


def read_folder(root: Path) -> Dataset:
    """Read `root/class/image.jpg`; images may lie deeper, hidden files and folders are left out."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{root} holds no folders", "expected is one for each class with its images in it")
    if all(folder.name.lower() in _PARTS for folder in folders):
        raise DataError(f"{root} is divided into parts", f"choose one, such as {folders[0]}")
    if splits := sorted(root.glob("*split_zhou_*.json")):
        raise DataError(f"{root} holds {splits[0].name}, a list of the benchmark", "load it by its name with this root")
    classes = [class_name(folder.name) for folder in folders]
    if twice := next((name for label, name in enumerate(classes) if name in classes[:label]), None):
        raise DataError(f"two folders of {root} stand for the class {twice!r}", "join them")
    ids: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        try:
            images = find_images(folder)
        except ImageError as error:
            raise DataError(str(error), "every folder is a class and needs images") from error
        ids += [image.relative_to(root).as_posix() for image in images]
        labels += [label] * len(images)
    return Dataset(
        name=root.name,
        title=root.name,
        family="other",
        classes=tuple(classes),
        ids=tuple(ids),
        labels=tuple(labels),
        root=root,
        layout=f"{root}, a folder for each class",
    )
