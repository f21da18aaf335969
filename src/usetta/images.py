"""Open an image safely: whatever the source, the answer is an RGB image or an `ImageError` that says what is wrong.

A file can be opened in two ways. People's own images are opened as people see them: turned upright by their EXIF tag,
transparency over white, 16-bit greys scaled to 8 bits. Benchmarks (`for_benchmark=True`) get what published loaders
compute, Pillow's plain `convert("RGB")`, which does none of this.

Only formats on a short list are tried, and the pixel limit is checked on the header, before anything is decoded. AVIF
and HEIC are on the list where Pillow or pillow-heif can decode them, which is found out when the first one is met. The
formats are opened through Pillow's registry instead of `Image.open`, because the latter compares with a process-wide
limit of its own and warns, and silencing a warning is process-wide too, which worker threads must not do.
"""

import hashlib
import io
import math
import os
import stat
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import (  # the plug-ins register themselves when they are imported
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
)

from usetta import web


class TensorLike(Protocol):
    """A tensor of torch, which this module does without."""

    def is_floating_point(self) -> bool:
        """Whether it holds floats."""
        ...


ImageSource: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | IO[bytes] | Image.Image | NDArray[Any] | TensorLike
)
SOURCES = "a path, bytes, a binary file, a PIL image, a numpy array or a torch tensor"

MAX_PIXELS = 100_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What is always opened. JPEG includes MPO, the JPEG of phones with several images, of which the first is taken."""

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"},
)
"""What is always taken for an image in a folder (in any case)."""

_BRANDS = {
    "AVIF": frozenset({b"avif", b"avis"}),
    "HEIC": frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}),
}
"""Formats that are opened where the installation can, by what their files call themselves."""
_OPTIONAL_SUFFIXES = {".avif": "AVIF", ".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC"}
_REMEDIES = {"AVIF": "pip install -U 'pillow>=11.3'", "HEIC": "pip install 'usetta[heif]'"}
_OTHER_SUFFIXES = frozenset(
    {".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"}
)
"""Images that nothing opens here; in a folder they are counted rather than passed over in silence."""

_CHANNELS = (1, 3, 4)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How an image with this EXIF orientation is turned upright."""


class ImageError(Exception):
    """An image that cannot be used: `path` names it, `reason` says why in plain words."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in `args`, so that the error survives pickling between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class _RefusedError(Exception):
    """A reason that this module gives, to be joined with the image's name."""


def open_image(source: ImageSource, *, for_benchmark: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the image in mode RGB, fully loaded, independent of its source and without metadata.

    `source` is a path, the bytes of a file, a binary file object (read from its start, left open), a PIL image, or an
    array or tensor of dtype uint8 or of floats in 0..1: (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels. Of an
    animation the first frame is taken.

    By default the image is as people see it: upright, transparent parts white, wide greys scaled to 8 bits.
    `for_benchmark=True` is Pillow's plain `convert("RGB")`, as published loaders do: EXIF orientation ignored, alpha
    dropped, 16-bit greys clipped.

    Every failure is an `ImageError`.
    """
    try:
        if isinstance(source, Image.Image):
            return _to_rgb(source, for_benchmark, max_pixels)
        if hasattr(source, "is_floating_point"):
            source = _from_tensor(source)
        if isinstance(source, np.ndarray):
            return _to_rgb(_from_array(source), for_benchmark, max_pixels)
        with _binary_stream(source) as stream:
            return _to_rgb(_read_header(stream), for_benchmark, max_pixels)
    except Exception as error:
        raise ImageError(_name(source), _reason(error)) from error


def is_web_address(text: str) -> bool:
    """Whether `text` is an http or https address."""
    return text.lower().startswith(("http://", "https://"))


def fetch_image(url: str, max_bytes: int = 2**28) -> bytes:
    """The file behind an http or https address, within the limits of `web`."""
    try:
        return web.fetch(url, max_bytes)
    except web.FetchError as error:
        raise ImageError(url, f"cannot be fetched: {error}") from error


def image_id(image: Image.Image) -> str:
    """Return a hash of the size and RGB pixels: the id of an image that has no id in a dataset."""
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    digest = hashlib.blake2b(f"{rgb.width}x{rgb.height}:".encode(), digest_size=16)
    digest.update(rgb.tobytes())
    return digest.hexdigest()


def file_digest(source: str | os.PathLike[str] | bytes) -> str:
    """Return a hash of an image's file or of its bytes, which shows without decoding whether it is still the same."""
    try:
        with _binary_stream(source) as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]  # type: ignore[arg-type]
    except Exception as error:
        raise ImageError(_name(source), _reason(error)) from error


def is_readable(suffix: str) -> bool:
    """Whether files with this suffix are taken for images in a folder."""
    suffix = suffix.lower()
    return suffix in SUFFIXES or (suffix in _OPTIONAL_SUFFIXES and _can_open(_OPTIONAL_SUFFIXES[suffix]))


def is_ignored(suffix: str) -> bool:
    """Whether files with this suffix are images that this installation cannot read."""
    suffix = suffix.lower()
    return (suffix in _OPTIONAL_SUFFIXES or suffix in _OTHER_SUFFIXES) and not is_readable(suffix)


def describe_ignored(counts: Mapping[str, int]) -> str:
    """A line about files that were passed over, by suffix, with what would make them readable."""
    kinds = [
        f"{count} {suffix} ({_REMEDIES.get(_OPTIONAL_SUFFIXES.get(suffix, ''), 'convert to JPEG or PNG')})"
        for suffix, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    total = sum(counts.values())
    return f"{total} {'file' if total == 1 else 'files'} ignored: {', '.join(kinds)}"


@cache
def _can_open(name: str) -> bool:
    """Whether this installation decodes AVIF or HEIC."""
    try:
        if name == "AVIF":
            return bool(import_module("PIL.AvifImagePlugin").SUPPORTED)
        import_module("pillow_heif").register_heif_opener(thumbnails=False)
    except ImportError:
        return False
    return True


def find_images(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the image files that `paths` stand for, in the order given.

    A file stands for itself, whatever its suffix. A folder stands for the images in it and below, sorted; links to
    folders are followed, hidden files and folders skipped. `ImageError` names a path that does not exist, or a folder
    that cannot be listed or holds no image.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    images: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(_images_below(path))
            if not below:
                raise ImageError(str(path), f"folder contains no images ({', '.join(sorted(SUFFIXES))})")
            images += below
        elif path.exists():
            images.append(path)
        else:
            raise ImageError(str(path), "no such file or folder")
    return images


def _images_below(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise ImageError(str(error.filename), _reason(error)) from error

    seen: set[Path] = set()  # links may lead in circles
    for parent, folders, names in os.walk(root, onerror=fail, followlinks=True):
        real = Path(parent).resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [folder for folder in folders if not folder.startswith(".")]  # in place: `walk` goes on with it
        for name in names:
            if not name.startswith(".") and is_readable(Path(name).suffix):
                yield Path(parent, name)


def _name(source: object) -> str:
    """What an error message calls the image."""
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(source)
    for attribute in ("filename", "name"):  # of PIL images and of open files
        name = getattr(source, attribute, None)
        if isinstance(name, str) and name:
            return name
    return f"<{type(source).__name__}>"


def _reason(error: Exception) -> str:
    """What went wrong, in plain words; Pillow's own message stays in the error's `__cause__`."""
    if isinstance(error, _RefusedError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not an image"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return "has more pixels than Pillow's own limit (PIL.Image.MAX_IMAGE_PIXELS)"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read ({os.strerror(error.errno)})"
    # Pillow reports a file that ends too early in many ways; these two phrases are the ones that mean nothing else.
    if "truncated" in str(error).lower() or "requires a buffer" in str(error):
        return "file is truncated"
    return "file is damaged or truncated"


@contextmanager
def _binary_stream(source: object) -> Iterator[IO[bytes]]:
    """Yield a seekable stream at its start; it is closed afterwards if it was opened here."""
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        path = Path(os.fsdecode(source))
        if "\0" in str(path):
            raise _RefusedError("not a possible file name")
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not stat.S_ISREG(mode):  # opening a pipe or a device may wait for ever
            raise _RefusedError("not a regular file")
        with path.open("rb") as stream:
            yield stream
    elif hasattr(source, "read"):
        yield _rewound(cast("IO[bytes]", source))
    else:
        raise _RefusedError(f"cannot open a {type(source).__name__}; pass {SOURCES}")


def _rewound(stream: IO[bytes]) -> IO[bytes]:
    """Return the caller's stream at its start, or its content if it cannot go back."""
    if hasattr(stream, "seekable") and stream.seekable():
        stream.seek(0)
        return stream
    content = stream.read()
    if not isinstance(content, bytes):
        raise _RefusedError("a file object must be open in binary mode")
    return io.BytesIO(content)


def _read_header(stream: IO[bytes]) -> ImageFile.ImageFile:
    """Recognise the format and read size and mode; no pixel is decoded."""
    prefix = stream.read(64)
    if not isinstance(prefix, bytes):
        raise _RefusedError("a file object must be open in binary mode")
    if not prefix:
        raise _RefusedError("file is empty")
    stream.seek(0)
    for name in FORMATS:
        factory, accepts = Image.OPEN[name]
        if accepts is not None and accepts(prefix) is True:
            return factory(stream, "")
    brand = _brand(prefix)
    if not brand:
        raise _RefusedError(f"not an image, or in an unsupported format (supported: {', '.join(FORMATS)}, AVIF, HEIC)")
    if not _can_open(brand):
        raise _RefusedError(f"{brand} images cannot be read by this installation: {_REMEDIES[brand]}")
    factory, _ = Image.OPEN["HEIF" if brand == "HEIC" else brand]
    return factory(stream, "")


def _brand(prefix: bytes) -> str | None:
    """AVIF or HEIC, which share a container: the brands stand after the length and the name of its first box."""
    if prefix[4:8] != b"ftyp":
        return None
    length = int.from_bytes(prefix[:4], "big")
    brands = {prefix[8:12], *(prefix[i : i + 4] for i in range(16, min(length, len(prefix)), 4))}
    return next((name for name, own in _BRANDS.items() if brands & own), None)


def _from_tensor(tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # numpy has no bfloat16
    return array


def _from_array(array: NDArray[Any]) -> Image.Image:
    """Return `array` (H, W), (H, W, C) or (C, H, W) as an 8-bit image."""
    if array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)):
        hint = "; pass a batch as a list of images" if array.ndim == 4 else ""
        raise _RefusedError(
            f"an array must be (H, W), (H, W, C) or (C, H, W) with C 1, 3 or 4, not {array.shape}{hint}"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.size == 0:
        raise _RefusedError(f"has no pixels (shape {array.shape})")
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # so written that NaN is refused as well
            raise _RefusedError(f"an array of floats must lie in 0..1, not {low:g}..{high:g}")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise _RefusedError(f"an array must be of dtype uint8, or of floats in 0..1, not {array.dtype}")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_rgb(image: Image.Image, for_benchmark: bool, max_pixels: int) -> Image.Image:
    """Check the size, decode, and convert."""
    width, height = image.size
    if width < 1 or height < 1:
        raise _RefusedError(f"has no pixels ({width} x {height})")
    if width * height > max_pixels:
        raise _RefusedError(
            f"has {width} x {height} pixels, more than the limit of {max_pixels:,}; raise max_pixels if you trust it"
        )
    _decode(image)
    if image.mode == "La":  # the one mode that Pillow converts to a single other
        image = image.convert("LA")
    rgb = _plain_rgb(image) if for_benchmark else _as_seen(_turned_upright(image))
    rgb.info = {}  # else the orientation would be applied again when the result is opened as a PIL image
    return rgb


def _decode(image: Image.Image) -> None:
    """Load the pixels. TIFF warns here above Pillow's own limit; `max_pixels` has already decided."""
    if image.width * image.height <= (Image.MAX_IMAGE_PIXELS or math.inf):
        image.load()
        return
    with warnings.catch_warnings():  # process-wide, hence only for the rare image that needs it
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image.load()


def _plain_rgb(image: Image.Image) -> Image.Image:
    """Pillow's `convert("RGB")`, without its warning that transparency gets lost: that is the intention."""
    if "transparency" in image.info:
        image = image.copy()
        del image.info["transparency"]
    return image.convert("RGB")


def _as_seen(image: Image.Image) -> Image.Image:
    """Convert to RGB the way a viewer shows the image on a white page."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey = _eight_bits(np.asarray(image), always_16=image.mode.startswith("I;16"))
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        page = Image.new("RGB", image.size, "white")
        page.paste(colours, mask=colours.getchannel("A"))
        return page
    return image.convert("RGB")


def _eight_bits(grey: NDArray[Any], *, always_16: bool) -> NDArray[np.uint8]:
    """Scale wide greys (H, W) to 0..255.

    Modes I and F do not say which value is white. The smallest customary one that the image does not exceed is
    taken (1 for floats, 255, 65535); an image beyond all of them is stretched from its darkest to its lightest value.
    """
    values = np.nan_to_num(grey.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    customary = (65535,) if always_16 else (1, 255, 65535) if grey.dtype.kind == "f" else (255, 65535)
    if low >= 0 and high <= customary[-1]:
        black, white = 0.0, float(min(white for white in customary if high <= white))
    else:
        black, white = low, high
    part_of_white = (values - black) / ((white - black) or 1.0)
    eight: NDArray[np.uint8] = np.rint(part_of_white * 255).astype(np.uint8)
    return eight


def _turned_upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation.

    `ImageOps.exif_transpose` also writes the EXIF block anew, and fails where that is malformed. An image whose
    EXIF cannot be read is fine otherwise and stays as it is.
    """
    try:
        turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (SyntaxError, ValueError, TypeError, LookupError, EOFError, OSError, struct.error):
        return image
    return image if turn is None else image.transpose(turn)
