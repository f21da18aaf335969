"""The files that OpenAI published, where its own package keeps them: `~/.cache/clip`.

The address of each file contains its SHA-256, which OpenAI's package checks after a download, and this one before it
loads the file.
"""

import hashlib
from pathlib import Path

from usetta.models.base import ModelError

FOLDER = Path("~/.cache/clip")
"""Where OpenAI's package keeps what it downloads."""

FILES = {
    "RN50": ("RN50.pt", "afeb0e10f9e5a86da6080e35cf09123aca3b358a0c3e3b6c78a7b63bc04b6762"),
    "RN101": ("RN101.pt", "8fa8567bab74a42d41c5915025a8e4538c3bdbe8804a470a72f30b0d94fab599"),
    "ViT-B-32": ("ViT-B-32.pt", "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af"),
    "ViT-B-16": ("ViT-B-16.pt", "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f"),
    "ViT-L-14": ("ViT-L-14.pt", "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836"),
    "ViT-L-14-336": ("ViT-L-14-336px.pt", "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02"),
}


def find(architecture: str) -> Path | None:
    """The file of this architecture, if OpenAI's package has downloaded it."""
    if architecture not in FILES:
        return None
    path = FOLDER.expanduser() / FILES[architecture][0]
    return path if path.is_file() else None


def verify(path: Path, architecture: str) -> None:
    """Refuse a file that is not the published one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    expected = FILES[architecture][1]
    if actual != expected:
        raise ModelError(
            f"{path} is not the file that OpenAI published: its SHA-256 is {actual[:12]}…, not {expected[:12]}…; "
            "remove it"
        )
