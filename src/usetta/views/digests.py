"""Digests of views of generated images: whether this machine, with its libraries, makes the views that others make."""

import hashlib

import numpy as np
from PIL import Image

from usetta.views.make import make_views
from usetta.views.recipe import ViewRecipe

_SHAPES = {
    "one pixel": (1, 1),
    "tiny": (3, 2),
    "small": (24, 31),
    "exact": (32, 32),
    "one side exact": (32, 47),
    "wide": (75, 50),
    "tall": (50, 75),
    "photograph": (500, 375),
    "upright": (333, 500),
    "1 to 20": (20, 400),
    "20 to 1": (400, 20),
    "huge": (3000, 2000),
}
EXPECTED = {
    "one pixel, crops, 32": "aed80b62b530ceb2",
    "one pixel, AugMix, 32": "a6a80185bd52183f",
    "tiny, crops, 32": "7867d45bb1b74f53",
    "tiny, AugMix, 32": "54f30eb5e040d855",
    "small, crops, 32": "83bd737adfa6b20c",
    "small, AugMix, 32": "93d12c7cfdf0fc46",
    "exact, crops, 32": "cca60872bcc944e8",
    "exact, AugMix, 32": "c3997029668425e2",
    "one side exact, crops, 32": "9102244e9aae9569",
    "one side exact, AugMix, 32": "94a134e86f3d1083",
    "wide, crops, 32": "0e7ab2e3b60d44c1",
    "wide, AugMix, 32": "bc503506d831f75f",
    "tall, crops, 32": "2cd731065724732c",
    "tall, AugMix, 32": "456c636511a6a1fe",
    "photograph, crops, 32": "5100b73cc149b1e8",
    "photograph, crops, 224": "77d7bb6f045b3fe2",
    "photograph, AugMix, 32": "b824492ab7d32ba2",
    "photograph, AugMix, 224": "384e253f3349376a",
    "upright, crops, 32": "9322c1602fcc3bff",
    "upright, AugMix, 32": "d7f5c483212a5729",
    "1 to 20, crops, 32": "78e5cf50d8d8aefc",
    "1 to 20, AugMix, 32": "b19c86cb739cb9a1",
    "20 to 1, crops, 32": "8cc4661029d50aa4",
    "20 to 1, AugMix, 32": "5833e9e53685455d",
    "huge, crops, 32": "785270a72feb0ca7",
    "huge, AugMix, 32": "1649b9fd3c5fac8f",
}
"""Made with Pillow 12.3, and equal with 10.3 and 13.0."""


def view_digests() -> dict[str, str]:
    """A digest of eight views for each shape, kind of view and size of view, named as in `EXPECTED`."""
    digests = {}
    for shape, (width, height) in _SHAPES.items():
        image = generated_image(width, height)
        for augmix in (False, True):
            for size in (32, 224) if shape == "photograph" else (32,):
                pixels = make_views(image, shape, ViewRecipe(8, size, augmix, severity=5.0)).numpy()
                name = f"{shape}, {'AugMix' if augmix else 'crops'}, {size}"
                digests[name] = hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()
    return digests


def generated_image(width: int, height: int) -> Image.Image:
    """An image of slopes, edges and fine texture. It is made of whole numbers, so it is the same everywhere."""
    y, x, channel = np.ogrid[:height, :width, :3]
    slopes = (x * 200 // width + y * 120 // height) * (3 - channel) // 3
    texture = (x * x * 31 + x * y * 17 + y * 57 + channel * 101) % 61
    edges = ((x // 7 + y // 5) % 2) * 40
    return Image.fromarray(np.clip(slopes + texture + edges - 30, 0, 255).astype(np.uint8))
