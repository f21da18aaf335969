"""Everything that datasets come from, in miniature, on a server of this machine: GitHub, the archives and the hub.

The fifteen have few images and classes, but their real names, layouts and formats. Some sources fail, each in a way of
its own, so that a dataset comes from the second or third place. `python -m data.world ROOT URL SEED` fetches all of
them in processes that it kills.
"""

import hashlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from data.archives import tar_of, zip_of
from data.miniature import SPLITS, UNSEEN
from data.server import Shelf
from usetta.data import NamedDataset, check, download, fetch_all, layouts, load_dataset, plan_fetch
from usetta.data.benchmark import BENCHMARKS
from usetta.data.layouts import class_folders
from usetta.data.named import DATASETS

TOKEN = "hf_secret"
_ALL_CLASSES = layouts.imagenet_classes()
IMAGENET = tuple(known for known in _ALL_CLASSES if known.also_in == "AR")[:3]
"""The classes of ImageNet and all its relatives in the miniature."""
AIRCRAFT = {"1514522.jpg": 1, "0747566.jpg": 0, "1008575.jpg": 2}
VARIANTS = ("707-320", "727-200", "A300B4")


def jpeg(name: str) -> bytes:
    """An image that no other name has."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((32, 24)).save(file, "JPEG")
    return file.getvalue()


def images_of(name: str) -> dict[str, bytes]:
    """The images of a dataset by id."""
    if name in SPLITS:
        return {image: jpeg(f"{name}/{image}") for image, _, _ in SPLITS[name][0]}
    ids = AIRCRAFT if name == "aircraft" else [f"{folder}/{n}.JPEG" for folder in class_folders(name) for n in "ab"]
    return {image: jpeg(f"{name}/{image}") for image in ids}


def list_of(name: str) -> bytes:
    """CoOp's list of a dataset."""
    items = SPLITS[name][0]
    train = [("train/a.jpg", 3, UNSEEN), *((f"train-{image}", label, text) for image, label, text in items)]
    return json.dumps({"train": train, "val": [], "test": items}).encode()


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def table_of(rows: Iterable[dict[str, object]], names: Iterable[str] = ()) -> bytes:
    """A Parquet file as `datasets` writes it."""
    import pyarrow  # an optional dependency
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows))
    if names:
        info = {"info": {"features": {"label": {"names": list(names), "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=2)
    return file.getvalue()


def webdataset_of(images: Iterable[tuple[str, bytes, int]]) -> bytes:
    files: dict[str, bytes] = {}
    for key, content, label in images:
        files |= {f"{key}.jpg": content, f"{key}.cls": str(label).encode()}
    return tar_of(files)


def put_on_hub(shelf: Shelf, repo: str, files: dict[str, bytes], wrong: str = "") -> None:
    """A repository of the hub; the checksum of the file `wrong` is not that of its content."""
    for path, content in files.items():
        shelf.files[f"cdn/{repo}/{path}"] = content
        shelf.redirects[f"/hub/datasets/{repo}/resolve/main/{path}"] = (
            f"{shelf.url.replace('127.0.0.1', 'localhost')}/cdn/{repo}/{path}"
        )
    for folder in {path.rpartition("/")[0] for path in files}:
        entries = [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": blob_id(content),
                "lfs": {"oid": hashlib.sha256(b"" if path == wrong else content).hexdigest(), "size": len(content)},
            }
            for path, content in files.items()
            if path.rpartition("/")[0] == folder
        ]
        shelf.files[f"hub/api/datasets/{repo}/tree/main/{folder}".rstrip("/")] = json.dumps(entries).encode()


def point_to(url: str) -> dict[str, str]:
    """Environment variables that lead to the server."""
    return {"HF_ENDPOINT": f"{url}/hub", "USETTA_GITHUB_RAW": f"{url}/raw"}


def _archive(name: str) -> bytes:
    images, member = images_of(name), next(b for b in BENCHMARKS if b.name == name).source.archive.member  # type: ignore[union-attr]
    files = {f"{member}/{image}": content for image, content in images.items()} | {"README": b"x"}
    if name == "aircraft":
        data = "fgvc-aircraft-2013b/data"
        files = {f"{data}/images/{image}": content for image, content in images.items()}
        files[f"{data}/variants.txt"] = "\n".join(VARIANTS).encode()
        lines = (f"{image[:-4]} {VARIANTS[label]}" for image, label in AIRCRAFT.items())
        files[f"{data}/images_variant_test.txt"] = "\n".join(lines).encode()
    if name == "caltech101":
        return zip_of({"caltech-101/101_ObjectCategories.tar.gz": tar_of(files), "__MACOSX/x": b"x"})
    return zip_of(files) if name in ("eurosat", "imagenet-sketch") else tar_of(files)


def small_benchmarks(url: str) -> dict[str, NamedDataset]:
    """The fifteen, with the sizes and sources of the miniature."""
    layouts.imagenet_classes = lambda: IMAGENET  # type: ignore[assignment]
    small = {}
    for benchmark in BENCHMARKS:
        source = benchmark.source
        assert source
        images = images_of(benchmark.name)
        classes = 4 if source.split else 3
        if source.archive:
            content = _archive(benchmark.name)
            checksum = source.archive.checksum and f"sha256:{hashlib.sha256(content).hexdigest()}"
            place = f"{url}/archives/{benchmark.name}/{source.archive.url.rpartition('/')[2]}"
            archive = replace(source.archive, url=place, checksum=checksum, bytes=len(content))
            source = replace(source, archive=archive)
        if source.split:
            source = replace(source, split=replace(source.split, blob=blob_id(list_of(benchmark.name))))
        source = replace(source, mirrors=tuple(replace(mirror, bytes=10**4) for mirror in source.mirrors))
        small[benchmark.name] = replace(benchmark, images=len(images), classes=classes, source=source)
    return small


def register_small(url: str) -> dict[str, NamedDataset]:
    """Let the names of the fifteen stand for their miniatures in this process."""
    small = small_benchmarks(url)
    DATASETS._values.update(small)
    return small


def stock(shelf: Shelf) -> None:
    """Fill the server; what fails is listed in the comments."""
    small = small_benchmarks(shelf.url)
    for name, benchmark in small.items():
        source = benchmark.source
        assert source
        if source.archive:
            shelf.files[source.archive.url.removeprefix(f"{shelf.url}/")] = _archive(name)
        if source.split:
            for place in source.split.places:
                shelf.files[f"raw/{place}"] = list_of(name)
    path = {
        name: f"/{b.source.archive.url.split('/', 3)[3]}" for name, b in small.items() if b.source and b.source.archive
    }
    first_list = {name: b.source.split.places[0] for name, b in small.items() if b.source and b.source.split}
    wnids = [known.wnid for known in IMAGENET]

    del shelf.files[f"raw/{first_list['dtd']}"]  # gone
    shelf.files[f"raw/{first_list['flowers102']}"] = b"another list"
    shelf.troubles[f"/raw/{first_list['pets']}"] = [503]
    shelf.troubles[path["dtd"]] = [-200, -100]  # connections that end after so many bytes
    shelf.troubles[path["food101"]], shelf.waits[429] = [429], 1

    del shelf.files[path["imagenet-a"][1:]]  # the archive and the first mirror are gone; WebDataset with classnames.txt
    rows = [
        (f"{image[:-5]}", content, wnids.index(image.split("/")[0]))
        for image, content in images_of("imagenet-a").items()
    ]
    files = {"test/0.tar": webdataset_of_jpegs(rows[:4]), "test/1.tar": webdataset_of_jpegs(rows[4:])}
    put_on_hub(
        shelf, "clip-benchmark/wds_imagenet-a", files | {"classnames.txt": "\n".join(k.name for k in IMAGENET).encode()}
    )

    shelf.files[path["imagenet-r"][1:]] = b"another archive"  # and the first mirror lacks an image
    table = [
        {"image": {"bytes": content, "path": image.split("/")[1]}, "wnid": image.split("/")[0]}
        for image, content in images_of("imagenet-r").items()
    ]
    put_on_hub(shelf, "axiong/imagenet-r", {"test/test-00000-of-00001.parquet": table_of(table[1:])})
    rows = [
        (image[:-5], content, wnids.index(image.split("/")[0])) for image, content in images_of("imagenet-r").items()
    ]
    put_on_hub(shelf, "clip-benchmark/wds_imagenet-r", {"test/0.tar": webdataset_of_jpegs(rows)})

    table = [  # gated; names carry the wnid
        {"image": {"bytes": content, "path": f"{image[10:-5]}_{image[:9]}.JPEG"}, "label": wnids.index(image[:9])}
        for image, content in images_of("imagenet").items()
    ]
    shelf.locked["/hub/api/datasets/ILSVRC"] = shelf.locked["/hub/datasets/ILSVRC"] = TOKEN
    put_on_hub(
        shelf,
        "ILSVRC/imagenet-1k",
        {
            "data/validation-00000-of-00002.parquet": table_of(table[::2]),
            "data/validation-00001-of-00002.parquet": table_of(table[1::2]),
            "data/train-0.parquet": b"x",
        },
    )

    del shelf.files[path["pets"][1:]]  # gone; a table with a column of names, and more images than needed
    table = [
        {"image": {"bytes": jpeg(f"pets/{image}"), "path": None}, "image_id": image[:-4], "label": 10 + label}
        for image, label, _ in (*SPLITS["pets"][0][::-1], ("more_1.jpg", 3, ""))
    ]
    put_on_hub(shelf, "timm/oxford-iiit-pet", {"data/test-00000-of-00001.parquet": table_of(table)})

    cars = [(f"s{n:07d}", jpeg(f"cars/{image}"), label) for n, (image, label, _) in enumerate(SPLITS["cars"][0])]
    tars = {f"test/{n}.tar": webdataset_of([row]) for n, row in zip((0, 9, 10), cars, strict=True)}
    put_on_hub(shelf, "clip-benchmark/wds_cars", tars | {"classnames.txt": b"other\nnames\nthan ours\nhas"})

    names = ["airplane_cabin", "abbey", "apse_indoor", UNSEEN]  # in another order, and without file names
    ours = {"abbey": 1, "airplane_cabin": 0, "indoor apse": 2}
    table = [
        {"image": {"bytes": jpeg(f"sun397/{image}"), "path": None}, "label": ours[text]}
        for image, _, text in SPLITS["sun397"][0]
    ]
    put_on_hub(
        shelf, "tanganke/sun397", {f"data/test-{n}.parquet": table_of([row], names) for n, row in enumerate(table)}
    )


def webdataset_of_jpegs(images: Iterable[tuple[str, bytes, int]]) -> bytes:
    """As `webdataset_of`, with the suffix of ImageNet."""
    files: dict[str, bytes] = {}
    for key, content, label in images:
        files |= {f"{key}.JPEG": content, f"{key}.cls": str(label).encode()}
    return tar_of(files)


def lay_out(root: Path) -> None:
    """All fifteen in CoOp's layout, as somebody has them who made it by hand."""
    for benchmark in BENCHMARKS:
        source = benchmark.source
        assert source
        for image, content in images_of(benchmark.name).items():
            path = root / source.images / image
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if source.split:
            (root / source.folder / source.split.file).write_bytes(list_of(benchmark.name))
    home = root / "fgvc_aircraft"
    (home / "variants.txt").write_text("\n".join(VARIANTS))
    lines = (f"{image[:-4]} {VARIANTS[label]}" for image, label in AIRCRAFT.items())
    (home / "images_variant_test.txt").write_text("\n".join(lines))


def take_steps_by_hand(root: Path) -> None:
    """UCF101's middle frames."""
    for image, content in images_of("ucf101").items():
        path = root / "ucf101/UCF-101-midframes" / image
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def attempt(root: Path) -> int:
    """The number of a process that fetches everything."""
    child = os.fork()
    if child:
        return child
    try:
        fetch_all(plan_fetch([], root), root, lambda text: None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent's code must not run here
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def main(root: Path, url: str, seed: int) -> dict[str, object]:
    """Fetch everything in processes of which ten are killed; returns what is there at last."""
    os.environ.update(point_to(url))
    register_small(url)
    wait = time.sleep
    download.time.sleep = lambda seconds: wait(seconds / 50)  # type: ignore[attr-defined, assignment]
    rng, killed = random.Random(seed), 0
    for _ in range(10):
        child = attempt(root)
        wait(rng.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)  # a process that has ended is there until it is waited for
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    _, status = os.waitpid(attempt(root), 0)
    take_steps_by_hand(root)
    return {
        "killed": killed,
        "status": status,
        "states": {report.name: report.state for report in check(root)},
        "fingerprints": {name: load_dataset(name, root).fingerprint for name in small_benchmarks(url)},
        "left": sorted(path.name for path in (root / ".usetta").iterdir() if path.is_dir()),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
