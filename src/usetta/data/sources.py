"""Where the fifteen come from: official archives with their published checksums, or what only people can do.

Of each archive only the folder that is needed is taken, and it is put where CoOp's layout has it. Checksums, and most
addresses, are those of torchvision's datasets (pytorch/vision e6f0400); the exceptions say where they come from. The
lists of the splits, and the middle frames of UCF101, are on CoOp's Google Drive (KaiyangZhou/CoOp, DATASETS.md), which
wants a browser.
"""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Source:
    """How to get one dataset."""

    folder: str
    """Its own folder in CoOp's layout."""
    archive: Archive | None = None
    by_hand: tuple[str, ...] = ()
    """Steps that give the images where there is no archive; `{folder}` stands for the set's folder."""
    drive: str = ""
    """Id of the list of the split on Google Drive."""

    @property
    def list_url(self) -> str:
        """Where a browser finds the list of the split; empty if the set has none."""
        return f"https://drive.google.com/file/d/{self.drive}/view" if self.drive else ""


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
_HUB = "https://huggingface.co/datasets"
_V2 = "imagenetv2-matched-frequency-format-val"

SOURCES = {
    "imagenet": Source(
        "imagenet",
        by_hand=(
            "Ask for access at https://image-net.org/download.php and download ILSVRC2012_img_val.tar "
            "(md5 29b22e2961454d5413ddabcf34fc5622).",
            "Sort its 50 000 images into one folder for each wnid, {folder}/images/val/n01440764/ and so on.",
        ),
    ),
    "imagenet-a": Source(
        "imagenet-adversarial",
        Archive(
            f"{_BERKELEY}/imagenet-a.tar",  # linked by hendrycks/natural-adv-examples
            "md5:c3e55429088dc681f30d81f4726b6595",  # ENSTA-U2IS-AI/torch-unconfidentty and others
            "imagenet-a",
            "imagenet-adversarial/imagenet-a",
        ),
    ),
    "imagenet-v2": Source(
        "imagenetv2",
        Archive(
            f"{_HUB}/vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz",  # modestyachts/ImageNetV2
            "sha256:f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",  # tensorflow/datasets
            _V2,
            f"imagenetv2/{_V2}",
        ),
    ),
    "imagenet-r": Source(
        "imagenet-rendition",
        Archive(
            f"{_BERKELEY}/imagenet-r.tar",  # linked by hendrycks/imagenet-r
            "md5:a61312130a589d0ca1a8fca1f2bd3337",  # ENSTA-U2IS-AI/torch-unconfidentty and others
            "imagenet-r",
            "imagenet-rendition/imagenet-r",
        ),
    ),
    "imagenet-sketch": Source(
        "imagenet-sketch",
        Archive(
            # The authors' copy on the hub. tensorflow/datasets knows sha256 4d3ce6b8... of the one on Google Drive;
            # whether the two are the same file is not known, so it is not demanded here.
            f"{_HUB}/songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip",
            None,
            "sketch",
            "imagenet-sketch/images",
        ),
    ),
    "dtd": Source(
        "dtd",
        Archive(
            f"{_OXFORD}/dtd/download/dtd-r1.0.1.tar.gz",
            "md5:fff73e5086ae6bdbea199a49dfb8a4c1",
            "dtd/images",
            "dtd/images",
        ),
        drive="1u3_QfB467jqHgNXC00UIzbLZRQCg2S7x",
    ),
    "flowers102": Source(
        "oxford_flowers",
        Archive(
            f"{_OXFORD}/flowers/102/102flowers.tgz",
            "md5:52808999861908f626f3c1f4e79d11fa",
            "jpg",
            "oxford_flowers/jpg",
        ),
        drive="1Pp0sRXzZFZq15zVOzKjKBu4A9i01nozT",
    ),
    "caltech101": Source(
        "caltech-101",
        Archive(
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",
            "md5:3138e1922a9193bfa496528edbbc45d0",
            "101_ObjectCategories",
            "caltech-101/101_ObjectCategories",
            within="caltech-101/101_ObjectCategories.tar.gz",
        ),
        drive="1hyarUivQE36mY6jSomru6Fjd-JzwcCzN",
    ),
    "aircraft": Source(
        "fgvc_aircraft",
        Archive(
            f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
            # torchvision has none. The home page publishes one; this value is the one that others copied from there.
            "md5:d4acdd33327262359767eeaa97a4f732",
            "fgvc-aircraft-2013b/data",
            "fgvc_aircraft",
        ),
    ),
    "pets": Source(
        "oxford_pets",
        Archive(
            f"{_OXFORD}/pets/data/images.tar.gz",
            "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c",
            "images",
            "oxford_pets/images",
        ),
        drive="1501r8Ber4nNKvmlFVQZ8SeUHTcdTTEqs",
    ),
    "ucf101": Source(
        "ucf101",
        by_hand=(
            "Download UCF-101-midframes.zip from "
            "https://drive.google.com/file/d/10Jqome3vtUA2keJkNanAiFpgbyC9Hc2O/view and unpack it in {folder}/.",
        ),
        drive="1I0S0q91hJfsV9Gf4xDIjgDq4AqBNJb1y",
    ),
    "cars": Source(
        "stanford_cars",
        by_hand=(
            "The images are no longer where they were published (ai.stanford.edu); "
            "https://github.com/pytorch/vision/issues/7545 collects copies. "
            "Put the 8 041 test images into {folder}/cars_test/.",
        ),
        drive="1ObCFbaAgVu0I-k_Au-gIUcefirdAuizT",
    ),
    "eurosat": Source(
        "eurosat",
        Archive(
            # torchvision's address: an unchanged copy of http://madm.dfki.de/files/sentinel/EuroSAT.zip.
            f"{_HUB}/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
            "md5:c8fa014336c82ac7804f0398fcb19387",
            "2750",
            "eurosat/2750",
        ),
        drive="1Ip7yaCWFi0eaOFUGga0lUdVi_DDQth1o",
    ),
    "sun397": Source(
        "sun397",
        by_hand=(
            "Download https://vision.princeton.edu/projects/2010/SUN/SUN397.tar.gz "
            "(39 GB, md5 8ca2778205c41d23104230ba66911c7a) and unpack it in {folder}/, which gives {folder}/SUN397/.",
        ),
        drive="1y2RD81BYuiyvebdN-JymPfyWYcd8_MUq",
    ),
    "food101": Source(
        "food-101",
        Archive(
            "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
            "md5:85eeb15f3717b99a5da872d97d918f87",
            "food-101/images",
            "food-101/images",
        ),
        drive="1QK0tGi096I0Ba6kggatX1ee6dJFIcEJl",
    ),
}
