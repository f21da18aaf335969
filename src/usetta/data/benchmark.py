"""The fifteen datasets of the paper: sizes, names, where they lie on disks, and where they come from.

Only the test split is used; of ImageNet, the validation images. Of each archive only the folder that is needed is
taken, and it is put where CoOp's layout has it. Checksums, and most addresses, are those of torchvision's datasets
(pytorch/vision e6f0400); the exceptions say where they come from. Mirrors on the hub are tried where an archive is
dead, gated or does not answer; each is checked against the list or the classes, so none has to be trusted. What is
known about them was read, not downloaded (docs/notes/mirrors.md). Tables come before tars, whose images have numbers
for names: the relatives of ImageNet have no list, so that their ids are the names that the copy has. The middle
frames of UCF101 are on CoOp's Google Drive (KaiyangZhou/CoOp, DATASETS.md), which demands a browser.

The lists of CoOp's splits lie byte by byte the same in `mariodoebler/test-time-adaptation` and `YBZh/DMN` (both MIT);
they are taken from there at a fixed commit and compared with their git blob ids.
"""

from functools import partial

from usetta.data.layouts import DiskLayout, read_aircraft, read_class_folders, read_split
from usetta.data.named import Archive, Mirror, NamedDataset, Source, SplitList, register_dataset

_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
_HUB = "https://huggingface.co/datasets"
_V2 = "imagenetv2-matched-frequency-format-val"
_LISTS = (
    "mariodoebler/test-time-adaptation/8b2ed63255d906b6b0afaefc6ae630b9ec4bdaa1/classification/datasets/other_lists"
)
_MORE_LISTS = "YBZh/DMN/c6c218c70ebbc701b31cc3d7f7b9597117daad8e/data/data_splits"
_MIT = "MIT (repository)"
_UNKNOWN = "not checked"
_GB = 10**9


def _clip_benchmark(name: str, gigabytes: float) -> Mirror:
    """A copy by LAION's CLIP benchmark: WebDataset tars in the original order, whose images are numbered."""
    return Mirror(f"clip-benchmark/wds_{name}", "test/*.tar", int(gigabytes * _GB), same_labels=True)


def _imagenet(
    name: str,
    title: str,
    images: int,
    classes: int,
    folders: tuple[str, ...],
    inner: tuple[str, ...],
    letter: str,
    archive: Archive | None = None,
    by_hand: tuple[str, ...] = (),
    mirrors: tuple[Mirror, ...] = (),
    licence: str = _MIT,
    balanced: bool = False,
) -> NamedDataset:
    """ImageNet or one of its relatives, which have a folder for each class; `letter` is TPT's name of it."""
    layout = DiskLayout(name, folders, inner)
    return NamedDataset(
        name,
        title,
        "imagenet",
        images,
        classes,
        reader=partial(read_class_folders, layout),
        own_reader=partial(read_class_folders, layout, own=True),
        aliases=(letter, *folders),
        source=Source(
            folders[0],
            archive,
            by_hand,
            mirrors=mirrors,
            images=f"{folders[0]}/{inner[0]}",
            licence=licence,
            balanced=balanced,
        ),
    )


def _fine_grained(
    name: str,
    title: str,
    images: int,
    classes: int,
    folders: tuple[str, ...],
    inner: tuple[str, ...],
    *aliases: str,
    split: str = "",
    blob: str = "",
    drive: str = "",
    archive: Archive | None = None,
    by_hand: tuple[str, ...] = (),
    mirrors: tuple[Mirror, ...] = (),
    licence: str = _UNKNOWN,
) -> NamedDataset:
    """A dataset with a list of its images: CoOp's `split`, on Google Drive under the id `drive`, or Aircraft's own.

    `split` is what CoOp calls it, and what the first of the repositories with lists does.
    """
    coops, _, lists = split.partition(" ")
    layout = DiskLayout(name, folders, inner, f"split_zhou_{coops}.json" if split else "")
    read = read_split if split else read_aircraft
    return NamedDataset(
        name,
        title,
        "fine-grained",
        images,
        classes,
        reader=partial(read, layout),
        own_reader=partial(read, layout, own=True),
        aliases=(*folders, *aliases),
        source=Source(
            folders[0],
            archive,
            by_hand,
            SplitList(
                layout.list_file,
                blob,
                (f"{_LISTS}/split_zhou_{lists}.json", f"{_MORE_LISTS}/{layout.list_file}"),
                f"https://drive.google.com/file/d/{drive}/view",
            )
            if split
            else None,
            mirrors,
            f"{folders[0]}/{inner[0]}".rstrip("/"),
            licence,
        ),
    )


BENCHMARKS = (
    _imagenet(
        *("imagenet", "ImageNet", 50_000, 1000, ("imagenet", "ilsvrc2012"), ("images/val", "val", ""), "I"),
        by_hand=(
            "Accept the terms at https://huggingface.co/datasets/ILSVRC/imagenet-1k, set HF_TOKEN to a token of yours, "
            "and run this command again; or ask for access at https://image-net.org/download.php, download "
            "ILSVRC2012_img_val.tar (md5 29b22e2961454d5413ddabcf34fc5622), and sort its 50 000 images into one folder "
            "for each wnid, {folder}/images/val/n01440764/ and so on.",
        ),
        mirrors=(
            Mirror("ILSVRC/imagenet-1k", "data/validation-*.parquet", int(6.7 * _GB), gated=True, same_labels=True),
        ),
        licence="non-commercial research and education",
        balanced=True,
    ),
    _imagenet(
        *("imagenet-a", "ImageNet-A", 7_500, 200, ("imagenet-adversarial", "imagenet-a"), ("imagenet-a", ""), "A"),
        archive=Archive(
            f"{_BERKELEY}/imagenet-a.tar",  # linked by hendrycks/natural-adv-examples
            "md5:c3e55429088dc681f30d81f4726b6595",  # ENSTA-U2IS-AI/torch-uncertainty and others
            "imagenet-a",
            "imagenet-adversarial/imagenet-a",
            bytes=int(0.69 * _GB),
        ),
        mirrors=(
            Mirror("barkermrl/imagenet-a", "data/train-*.parquet", int(0.68 * _GB)),
            _clip_benchmark("imagenet-a", 0.70),
        ),
    ),
    _imagenet(
        *("imagenet-v2", "ImageNet-V2", 10_000, 1000, ("imagenetv2", _V2), (_V2, ""), "V"),
        archive=Archive(
            f"{_HUB}/vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz",  # modestyachts/ImageNetV2
            "sha256:f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",  # tensorflow/datasets
            _V2,
            f"imagenetv2/{_V2}",
            bytes=int(1.26 * _GB),
        ),
        mirrors=(_clip_benchmark("imagenetv2", 1.3),),
        balanced=True,
    ),
    _imagenet(
        *("imagenet-r", "ImageNet-R", 30_000, 200, ("imagenet-rendition", "imagenet-r"), ("imagenet-r", ""), "R"),
        archive=Archive(
            f"{_BERKELEY}/imagenet-r.tar",  # linked by hendrycks/imagenet-r
            "md5:a61312130a589d0ca1a8fca1f2bd3337",  # ENSTA-U2IS-AI/torch-uncertainty and others
            "imagenet-r",
            "imagenet-rendition/imagenet-r",
            bytes=int(2.19 * _GB),
        ),
        mirrors=(
            Mirror("axiong/imagenet-r", "test/test-*.parquet", int(2.15 * _GB)),
            _clip_benchmark("imagenet-r", 2.2),
        ),
    ),
    _imagenet(
        *("imagenet-sketch", "ImageNet-Sketch", 50_889, 1000, ("imagenet-sketch",), ("images", "sketch", ""), "K"),
        archive=Archive(
            # The authors' copy on the hub. tensorflow/datasets knows sha256 4d3ce6b8... of the one on Google Drive;
            # whether the two are the same file is not known, so it is not demanded here.
            f"{_HUB}/songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip",
            None,
            "sketch",
            "imagenet-sketch/images",
            bytes=int(7.6 * _GB),
        ),
        mirrors=(_clip_benchmark("imagenet_sketch", 7.6),),
    ),
    _fine_grained(
        *("dtd", "DTD", 1_692, 47, ("dtd",), ("images", "dtd/images"), "describable_textures"),
        split="DescribableTextures dtd",
        blob="8dd197a94b598fa44ee3c9e35c486dd017ab00a7",
        drive="1u3_QfB467jqHgNXC00UIzbLZRQCg2S7x",
        archive=Archive(
            f"{_OXFORD}/dtd/download/dtd-r1.0.1.tar.gz",
            "md5:fff73e5086ae6bdbea199a49dfb8a4c1",
            "dtd/images",
            "dtd/images",
            bytes=int(0.63 * _GB),
        ),
    ),
    _fine_grained(
        *("flowers102", "Flowers102", 2_463, 102, ("oxford_flowers", "flower102", "flowers102"), ("jpg",)),
        split="OxfordFlowers flowers102",
        blob="8d10037b0690b6c65e307a354b039efb0f42404c",
        drive="1Pp0sRXzZFZq15zVOzKjKBu4A9i01nozT",
        archive=Archive(
            f"{_OXFORD}/flowers/102/102flowers.tgz",
            "md5:52808999861908f626f3c1f4e79d11fa",
            "jpg",
            "oxford_flowers/jpg",
            bytes=int(0.35 * _GB),
        ),
    ),
    _fine_grained(
        *("caltech101", "Caltech101", 2_465, 100, ("caltech-101",), ("101_ObjectCategories", "")),
        split="Caltech101 caltech101",
        blob="8be694a80de04a39fb159c462bea9696aa47ccf1",
        drive="1hyarUivQE36mY6jSomru6Fjd-JzwcCzN",
        archive=Archive(
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",
            "md5:3138e1922a9193bfa496528edbbc45d0",
            "101_ObjectCategories",
            "caltech-101/101_ObjectCategories",
            within="caltech-101/101_ObjectCategories.tar.gz",
            bytes=int(0.14 * _GB),
        ),
        licence="CC BY 4.0 (as copies on the hub state)",
    ),
    _fine_grained(
        *("aircraft", "Aircraft", 3_333, 100, ("fgvc_aircraft", "fgvc-aircraft-2013b", "aircraft")),
        ("images", "data/images", "fgvc-aircraft-2013b/data/images"),
        archive=Archive(
            f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
            # torchvision has none. The home page publishes one; this value is the one that others copied from there.
            "md5:d4acdd33327262359767eeaa97a4f732",
            "fgvc-aircraft-2013b/data",
            "fgvc_aircraft",
            bytes=int(2.75 * _GB),
        ),
        licence="non-commercial research",
    ),
    _fine_grained(
        *("pets", "Pets", 3_669, 37, ("oxford_pets", "oxford-iiit-pet", "pets"), ("images", "")),
        split="OxfordPets oxford_pets",
        blob="fa821d9f9e7d32fdf3640bf74fa7491ed04f37da",
        drive="1501r8Ber4nNKvmlFVQZ8SeUHTcdTTEqs",
        archive=Archive(
            f"{_OXFORD}/pets/data/images.tar.gz",
            "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c",
            "images",
            "oxford_pets/images",
            bytes=int(0.79 * _GB),
        ),
        mirrors=(Mirror("timm/oxford-iiit-pet", "data/test-*.parquet", int(0.41 * _GB)),),
        licence="CC BY-SA 4.0",
    ),
    _fine_grained(
        *("ucf101", "UCF101", 3_783, 101, ("ucf101",), ("UCF-101-midframes", "")),
        split="UCF101 ucf101",
        blob="ea87e3de7b4f6f00fdd77618e34a23508b4c5590",
        drive="1I0S0q91hJfsV9Gf4xDIjgDq4AqBNJb1y",
        by_hand=(
            "Download UCF-101-midframes.zip from "
            "https://drive.google.com/file/d/10Jqome3vtUA2keJkNanAiFpgbyC9Hc2O/view and unpack it in {folder}/.",
        ),
    ),
    _fine_grained(
        *("cars", "Cars", 8_041, 196, ("stanford_cars", "cars"), ("",)),
        split="StanfordCars stanford_cars",
        blob="dcdb8264712e9940e74cfb0f06ddb8f9cc239b81",
        drive="1ObCFbaAgVu0I-k_Au-gIUcefirdAuizT",
        by_hand=(
            "The images are no longer where they were published (ai.stanford.edu); "
            "https://github.com/pytorch/vision/issues/7545 collects copies. "
            "Put the 8 041 test images into {folder}/cars_test/.",
        ),
        mirrors=(
            _clip_benchmark("cars", 1.01),
            Mirror("tanganke/stanford_cars", "data/test-*.parquet", int(1.0 * _GB)),
        ),
    ),
    _fine_grained(
        *("eurosat", "EuroSAT", 8_100, 10, ("eurosat",), ("2750", "eurosat/2750", "")),
        split="EuroSAT eurosat",
        blob="6bdc847a5d5c49dcc78e8cb8707b87198cbfa5a4",
        drive="1Ip7yaCWFi0eaOFUGga0lUdVi_DDQth1o",
        archive=Archive(
            # torchvision's address: an unchanged copy of http://madm.dfki.de/files/sentinel/EuroSAT.zip.
            f"{_HUB}/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
            "md5:c8fa014336c82ac7804f0398fcb19387",
            "2750",
            "eurosat/2750",
            bytes=int(0.09 * _GB),
        ),
        licence="MIT",
    ),
    _fine_grained(
        *("sun397", "SUN397", 19_850, 397, ("sun397",), ("SUN397", "")),
        split="SUN397 sun397",
        blob="8d5725db8f70bcf02245665304f863e68f96a24c",
        drive="1y2RD81BYuiyvebdN-JymPfyWYcd8_MUq",
        by_hand=(
            "The archive is no longer where it was published (https://github.com/pytorch/vision/issues/9348). If you "
            "find SUN397.tar.gz (39 GB, md5 8ca2778205c41d23104230ba66911c7a), unpack it in {folder}/, which gives "
            "{folder}/SUN397/.",
        ),
        mirrors=(Mirror("tanganke/sun397", "data/test-*.parquet", int(7.3 * _GB)),),
    ),
    _fine_grained(
        *("food101", "Food101", 30_300, 101, ("food-101",), ("images",)),
        split="Food101 food101",
        blob="39557040ee6501bd32aa8b5dfd75f7941a32f0a7",
        drive="1QK0tGi096I0Ba6kggatX1ee6dJFIcEJl",
        archive=Archive(
            "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
            "md5:85eeb15f3717b99a5da872d97d918f87",
            "food-101/images",
            "food-101/images",
            bytes=int(5.0 * _GB),
        ),
        mirrors=(Mirror("ethz/food101", "data/*.parquet", int(5.06 * _GB)),),
        licence="beyond scientific fair use, ask the owners",
    ),
)
"""In the order of the paper's tables."""

for _benchmark in BENCHMARKS:
    register_dataset(_benchmark)
