"""Every kind of bad or odd image that people have, and the pixel values or the message it should give."""

import errno
import io
import pickle
import struct
import sys
import threading
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from usetta import images
from usetta.images import FORMATS, ImageError, find_images, image_id, is_readable, open_image


def encoded(image, file_format="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def noise(width=60, height=40):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(image):
    assert type(image) is Image.Image
    assert image.mode == "RGB"
    return np.asarray(image)


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b"\0"))
        + png_chunk(b"IEND", b"")
    )


def reason_of(source, **options):
    with pytest.raises(ImageError) as caught:
        open_image(source, **options)
    assert str(caught.value) == f"{caught.value.path}: {caught.value.reason}"
    return caught.value.reason


# --- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "BMP", "TIFF"])
def test_every_lossless_format_gives_the_pixels_that_were_saved(file_format):
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(noise(), file_format, **options)
    assert np.array_equal(pixels(open_image(data)), np.asarray(noise()))


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_format_equals_plain_pillow_on_an_ordinary_image(file_format):
    data = encoded(noise(), file_format)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(pixels(open_image(data)), expected)
    assert np.array_equal(pixels(open_image(data, for_benchmark=True)), expected)


@pytest.mark.parametrize("file_format", ["AVIF", "HEIF"])
def test_formats_that_some_installations_read(file_format):
    if not is_readable(f".{file_format.lower()}"):
        pytest.skip(f"this installation does not read {file_format}")
    data = encoded(noise().resize((600, 400)), file_format, quality=95)
    difference = pixels(open_image(data)).astype(int) - np.asarray(noise().resize((600, 400)))
    assert np.abs(difference).mean() < 6
    assert reason_of(data, max_pixels=239_999).startswith("has 600 x 400 pixels, more than the limit of 239,999")
    assert reason_of(data[: len(data) // 2]) in ("file is truncated", "file is damaged or truncated")
    exif = Image.Exif()
    exif[0x112] = 6
    assert open_image(encoded(noise(), file_format, exif=exif.tobytes())).size == (40, 60), "upright"


def test_all_kinds_of_source_give_the_same_image(tmp_path):
    path = tmp_path / "cat.png"
    noise().save(path)
    with path.open("rb") as file:
        file.seek(7)
        from_file = open_image(file)
        assert not file.closed
    array = np.asarray(noise())
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    sources = [str(path), path, path.read_bytes(), bytearray(path.read_bytes()), noise(), array, tensor.numpy()]
    sources += [tensor, tensor.permute(1, 2, 0), (tensor / 255).requires_grad_(), (tensor / 255).double()]
    for result in [from_file, *map(open_image, sources)]:
        assert np.array_equal(pixels(result), np.asarray(noise()))


def test_a_stream_that_cannot_seek_is_read_whole():
    class Pipe(io.RawIOBase):
        def __init__(self, data):
            self.data = data

        def readable(self):
            return True

        def readall(self):
            return self.data

        def read(self, size=-1):
            assert size == -1
            return self.data

    assert np.array_equal(pixels(open_image(Pipe(encoded(noise())))), np.asarray(noise()))


def test_mpo_of_phones_gives_its_first_image():
    data = encoded(noise(), "MPO", save_all=True, append_images=[Image.new("RGB", (60, 40))])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert np.array_equal(pixels(open_image(data)), np.asarray(Image.open(io.BytesIO(data))))


def test_the_result_does_not_share_memory_with_its_source():
    image = noise()
    result = open_image(image)
    result.putpixel((0, 0), (1, 2, 3))
    assert image.getpixel((0, 0)) == noise().getpixel((0, 0))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[0, 7], [100, 255]], np.uint8), [[[0] * 3, [7] * 3], [[100] * 3, [255] * 3]]),
        (np.array([[[7]]], np.uint8), [[[7, 7, 7]]]),
        (np.array([[[1, 2, 3]]], np.uint8), [[[1, 2, 3]]]),
        (np.array([[[1, 2, 3, 255]]], np.uint8), [[[1, 2, 3]]]),
        (np.array([[[1, 2, 3, 0]]], np.uint8), [[[255, 255, 255]]]),
        (np.array([[[0.0, 0.5, 1.0]]], np.float32), [[[0, 128, 255]]]),
        (np.array([[0.2]], np.float64), [[[51, 51, 51]]]),
        (
            np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::2],
            [[[0, 1, 2], [6, 7, 8]], [[12, 13, 14], [18, 19, 20]]],
        ),
    ],
)
def test_arrays(array, expected):
    assert pixels(open_image(array)).tolist() == expected


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 3, 8, 9), np.uint8), "not (2, 3, 8, 9); pass a batch as a list of images"),
        (np.zeros((8, 9, 2), np.uint8), "not (8, 9, 2)"),
        (np.zeros(5, np.uint8), "not (5,)"),
        (np.zeros((0, 9), np.uint8), "has no pixels"),
        (np.zeros((4, 4), np.uint16), "not uint16"),
        (np.zeros((4, 4), bool), "not bool"),
        (np.full((4, 4), 200.0), "must lie in 0..1, not 200..200"),
        (np.full((4, 4), np.nan), "must lie in 0..1"),
        (np.full((4, 4), -0.1), "must lie in 0..1"),
    ],
)
def test_arrays_that_are_no_image(array, reason):
    with pytest.raises(ImageError) as caught:
        open_image(array)
    assert caught.value.path == "<ndarray>"
    assert reason in caught.value.reason


@pytest.mark.parametrize("source", [None, 3, ["a.jpg"]])
def test_things_that_are_no_source(source):
    assert reason_of(source).startswith(f"cannot open a {type(source).__name__}; pass a path")


def test_text_streams_are_refused():
    assert reason_of(io.StringIO("text")) == "a file object must be open in binary mode"


class Pipe(io.BytesIO):
    """A stream that cannot go back, as that of a socket."""

    def seekable(self) -> bool:
        return False


def test_streams_that_cannot_go_back_are_read_once():
    content = encoded(noise(), "PNG")
    assert open_image(Pipe(content)).tobytes() == open_image(io.BytesIO(content)).tobytes()
    text = Pipe(b"text")
    text.read = lambda: "text"  # type: ignore[method-assign, assignment]
    assert reason_of(text) == "a file object must be open in binary mode"


def test_an_open_file_is_called_by_its_name(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with (tmp_path / "a.jpg").open("rb") as file, pytest.raises(ImageError) as caught:
        open_image(file)
    assert caught.value.path == str(tmp_path / "a.jpg")


@pytest.mark.parametrize(("name", "module"), [("AVIF", "PIL.AvifImagePlugin"), ("HEIC", "pillow_heif")])
def test_what_this_installation_cannot_decode_is_not_taken_for_an_image(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert not images._can_open.__wrapped__(name)
    registered: list[bool] = []
    library = SimpleNamespace(SUPPORTED=True, register_heif_opener=lambda thumbnails: registered.append(thumbnails))
    monkeypatch.setitem(sys.modules, module, library)
    assert images._can_open.__wrapped__(name)
    assert registered == ([False] if name == "HEIC" else [])


# --- files that cannot be opened -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", FORMATS)
def test_truncated_anywhere(file_format, tmp_path):
    data = encoded(noise(), file_format)
    path = tmp_path / f"cat.{file_format.lower()}"
    # Pillow finds nothing amiss when only PNG's or GIF's closing marker is missing: all pixels are there.
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        path.write_bytes(data[: int(part * len(data))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # TIFF announces a corrupt header before it fails
            with pytest.raises(ImageError, match=r"file is (damaged or )?truncated$") as caught:
                open_image(path)
        assert caught.value.path == str(path)


def test_truncated_message_names_file_and_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = encoded(noise(), "JPEG")
    Path("cat.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError) as caught:
        open_image("cat.jpg")
    assert str(caught.value) == "cat.jpg: file is truncated"
    assert (caught.value.path, caught.value.reason) == ("cat.jpg", "file is truncated")


@pytest.mark.parametrize("file_format", FORMATS)
def test_damaged_bytes_never_raise_anything_else(file_format):
    rng = np.random.default_rng(1)
    data = np.frombuffer(encoded(noise(16, 12), file_format), np.uint8)
    reasons = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(150):
            damaged = data.copy()
            where = rng.integers(len(data) if rng.random() < 0.5 else min(64, len(data)), size=4)
            damaged[where] = rng.integers(0, 256, size=4)
            try:
                assert open_image(damaged.tobytes(), max_pixels=1_000_000).mode == "RGB"
            except ImageError as error:
                reasons.append(error.reason)
    assert len(reasons) > 10
    assert all(reasons)


def test_zero_bytes(tmp_path):
    path = tmp_path / "empty.jpg"
    path.touch()
    assert reason_of(path) == "file is empty"
    assert reason_of(b"") == "file is empty"


@pytest.mark.parametrize(
    "content",
    [
        b"This is a letter, not an image.\n",
        b"<html>404 Not Found</html>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"8BPS\x00\x01" + bytes(40),
        encoded(noise(), "PPM"),
        encoded(noise(), "ICO"),
    ],
    ids=["text", "html", "eps", "psd", "ppm", "ico"],
)
def test_other_content_named_jpg(content, tmp_path):
    path = tmp_path / "cat.jpg"
    path.write_bytes(content)
    expected = "not an image, or in an unsupported format (supported: JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF, HEIC)"
    assert reason_of(path) == expected


def test_vanished_file(tmp_path):
    path = tmp_path / "gone.jpg"
    noise().save(path)
    path.unlink()
    with pytest.raises(ImageError) as caught:
        open_image(path)
    assert str(caught.value) == f"{path}: no such file"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_folder(tmp_path):
    assert reason_of(tmp_path) == "is a folder, not an image"


def test_device():
    assert reason_of("/dev/zero") == "not a regular file"


def test_impossible_name():
    assert reason_of("a\0b.jpg") == "not a possible file name"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "no permission to read it"),
        (OSError(errno.EIO, "Input/output error"), "cannot be read (Input/output error)"),
    ],
)
def test_unreadable_file(tmp_path, monkeypatch, error, reason):
    """Simulated, because tests may run as root, whom no permission stops."""
    path = tmp_path / "locked.png"
    noise().save(path)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    assert reason_of(path) == reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "not enough memory to decode it"),
        (OSError(errno.ESTALE, "x"), "cannot be read (Stale file handle)"),
    ],
)
def test_failure_while_decoding(monkeypatch, error, reason):
    def fail(self):
        raise error

    data = encoded(noise(), "BMP")
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert reason_of(data) == reason


def test_interrupts_pass_through(monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    data = encoded(noise(), "BMP")
    monkeypatch.setattr(ImageFile.ImageFile, "load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_image(data)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ImageError("cat.jpg", "file is empty")))
    assert (error.path, error.reason, str(error)) == ("cat.jpg", "file is empty", "cat.jpg: file is empty")


# --- size ----------------------------------------------------------------------------------------------------------


def claims_of_huge_size():
    """Tiny files whose headers claim many pixels; 150 million lies between Pillow's own warning and its error."""
    bmp = bytearray(encoded(noise(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 50_000, 50_000)
    gif = bytearray(encoded(noise(), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    jpeg = bytearray(encoded(noise(), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65_000, 65_000)
    tiff = encoded(noise(), "TIFF")
    for tag, value in ((256, 60), (257, 40)):
        field = struct.pack("<HHI", tag, 4, 1)
        short = struct.pack("<HHI", tag, 3, 1)
        old = next(f + struct.pack("<I", value) for f in (field, short) if f + struct.pack("<I", value) in tiff)
        tiff = tiff.replace(old, field + struct.pack("<I", 40_000))
    return {
        "png": png_claiming(60_000, 60_000),
        "png150M": png_claiming(15_000, 10_000),
        "bmp": bytes(bmp),
        "gif": bytes(gif),
        "jpeg": bytes(jpeg),
        "tiff": tiff,
    }


@pytest.mark.parametrize("kind", claims_of_huge_size())
def test_decompression_bomb_is_refused_before_decoding(kind, tmp_path, monkeypatch):
    path = tmp_path / f"bomb.{kind}"
    path.write_bytes(claims_of_huge_size()[kind])
    assert path.stat().st_size < 10_000

    def decode(self):
        raise AssertionError("decoded")

    for plugin in (ImageFile.ImageFile, Image.Image):
        monkeypatch.setattr(plugin, "load", decode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = reason_of(path)
    assert reason.endswith("000 pixels, more than the limit of 100,000,000; raise max_pixels if you trust it") or (
        reason.startswith("has 65535 x 65535 pixels, more than the limit")
    )


def test_webp_bomb():
    data = bytearray(encoded(noise(), "WEBP", lossless=True))
    bits = struct.unpack_from("<I", data, 21)[0]
    data[21:25] = struct.pack("<I", (bits & ~0xFFFFFFF) | 16_382 | 16_382 << 14)
    assert "pixels" in reason_of(bytes(data))


def test_the_limit_is_exact_and_holds_for_every_source():
    sources = [encoded(noise(60, 40)), noise(60, 40), np.asarray(noise(60, 40))]
    for source in sources:
        assert open_image(source, max_pixels=2400).size == (60, 40)
        assert reason_of(source, max_pixels=2399).startswith("has 60 x 40 pixels, more than the limit of 2,399")


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_pillows_own_limit_neither_warns_nor_changes(file_format, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # 2400 pixels: Pillow would warn
    data = encoded(noise(60, 40), file_format)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert open_image(data).size == (60, 40)
    assert caught == []
    assert Image.MAX_IMAGE_PIXELS == 2000


def test_pillows_own_error_is_translated(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "Pillow's own limit" in reason_of(encoded(noise(60, 40), "TIFF"))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_no_pixels(size):
    assert reason_of(Image.new("RGB", size)) == f"has no pixels ({size[0]} x {size[1]})"
    with pytest.raises(ImageError):
        open_image(png_claiming(*size))


# --- modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (1, 1), 1), (255, 255, 255)),
        (Image.new("L", (1, 1), 77), (77, 77, 77)),
        (Image.new("HSV", (1, 1), (0, 255, 200)), (200, 0, 0)),
        (Image.new("YCbCr", (1, 1), (120, 128, 128)), (120, 120, 120)),
        (Image.new("LAB", (1, 1), (255, 128, 128)), (255, 255, 255)),
        (Image.new("CMYK", (1, 1), (255, 0, 0, 0)), (0, 255, 255)),
        (Image.new("RGBX", (1, 1), (1, 2, 3, 4)), (1, 2, 3)),
        (Image.new("LA", (1, 1), (100, 255)), (100, 100, 100)),
        (Image.new("LA", (1, 1), (100, 0)), (255, 255, 255)),
        (Image.new("La", (1, 1), (0, 51)), (204, 204, 204)),
        (Image.new("PA", (1, 1)), (255, 255, 255)),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 51)), (255, 204, 204)),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 51)).convert("RGBa"), (255, 204, 204)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_mode(image, expected):
    assert pixels(open_image(image))[0, 0].tolist() == pytest.approx(expected, abs=1)
    assert open_image(image, for_benchmark=True).mode == "RGB"


def test_cmyk_jpeg():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = encoded(image, "JPEG", quality=100)
    assert b"Adobe" in data  # stored inverted, as Photoshop does
    for for_benchmark in (False, True):
        result = pixels(open_image(data, for_benchmark=for_benchmark))
        assert result[8, 8].tolist() == pytest.approx([255, 0, 0], abs=2)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bit_greys_are_scaled_not_clipped(file_format):
    values = np.array([[0, 128, 129, 257, 32768, 40000, 65535]], np.uint16)
    result = pixels(open_image(encoded(Image.fromarray(values), file_format)))
    assert result[0, :, 0].tolist() == [0, 0, 1, 1, 128, 156, 255]
    assert np.array_equal(result[..., 0], result[..., 2])


def test_16_bit_greys_big_endian_and_benchmark():
    values = np.array([[0, 100, 255, 256, 65535]], np.uint16)
    big_endian = Image.frombytes("I;16B", (5, 1), values.astype(">u2").tobytes())
    assert pixels(open_image(big_endian))[0, :, 0].tolist() == [0, 0, 1, 1, 255]
    plain = open_image(encoded(Image.fromarray(values)), for_benchmark=True)
    assert pixels(plain)[0, :, 0].tolist() == [0, 100, 255, 255, 255]


def test_16_bit_colours():
    rows = b"\0" + struct.pack(">6H", 0, 0x1234, 0xFFFF, 0x8000, 0x00FF, 0x0100)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows))
    assert pixels(open_image(data + png_chunk(b"IEND", b""))).tolist() == [[[0, 0x12, 0xFF], [0x80, 0, 1]]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[0, 1_000_000, 2_000_000]], np.int32), [0, 128, 255]),
        (np.array([[-100, 0, 100]], np.int32), [0, 128, 255]),
        (np.array([[100_000, 100_000, 100_000]], np.int32), [0, 0, 0]),
        (np.array([[0, 0.2, 1]], np.float32), [0, 51, 255]),
        (np.array([[0, 100, 255]], np.float32), [0, 100, 255]),
        (np.array([[-0.5, 0, 0.5]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, np.inf, 1]], np.float32), [0, 0, 255]),
    ],
)
def test_32_bit_greys(values, expected):
    data = encoded(Image.fromarray(values), "TIFF")
    assert pixels(open_image(data))[0, :, 0].tolist() == expected


def palette_image():
    """Index 0 opaque red, 1 transparent green, 2 blue at one fifth."""
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return image


def test_palette_with_transparency():
    data = encoded(palette_image(), "PNG", transparency=bytes([255, 0, 51]))
    assert Image.open(io.BytesIO(data)).mode == "P"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow warns that transparency gets lost
        seen, plain = open_image(data), open_image(data, for_benchmark=True)
    assert pixels(seen).tolist() == [[[255, 0, 0], [255, 255, 255], [204, 204, 255]]]
    assert pixels(plain).tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]


@pytest.mark.parametrize(
    ("mode", "transparent", "other"),
    [("1", 0, 1), ("L", 10, 20), ("RGB", (1, 2, 3), (1, 2, 4))],
)
def test_one_transparent_colour(mode, transparent, other):
    image = Image.new(mode, (2, 1), transparent)
    image.putpixel((1, 0), other)
    data = encoded(image, "PNG", transparency=transparent)
    result = pixels(open_image(data))
    assert result[0, 0].tolist() == [255, 255, 255]
    assert np.array_equal(result[0, 1], np.asarray(image.convert("RGB"))[0, 1])
    assert np.array_equal(pixels(open_image(data, for_benchmark=True)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_seen_on_white_but_dropped_for_benchmarks(file_format):
    image = Image.new("RGBA", (3, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    image.putpixel((2, 0), (0, 100, 250, 102))
    options = {"lossless": True, "exact": True} if file_format == "WEBP" else {}
    data = encoded(image, file_format, **options)
    assert pixels(open_image(data)).tolist() == [[[10, 20, 30], [255, 255, 255], [153, 193, 253]]]
    plain = pixels(open_image(data, for_benchmark=True))
    assert plain.tolist() == [[[10, 20, 30], [10, 20, 30], [0, 100, 250]]]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(file_format):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], duration=100, **options)
    opened = Image.open(io.BytesIO(data))
    assert opened.n_frames == 3
    assert pixels(open_image(data)).reshape(-1, 3).tolist() == [[255, 0, 0]] * 64
    assert pixels(open_image(opened))[0, 0].tolist() == [255, 0, 0]


# --- orientation ---------------------------------------------------------------------------------------------------

BLOCK = 16


def upright_blocks():
    """2 x 3 blocks of distinct colours, large enough to survive JPEG."""
    colours = np.array(
        [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[255, 255, 0], [0, 0, 0], [255, 255, 255]]],
        np.uint8,
    )
    return colours.repeat(BLOCK, 0).repeat(BLOCK, 1)


def as_stored(upright, orientation):
    """What a camera stores, from the EXIF definition: which side of the scene the first row and column show."""
    return {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),  # first row: left side; first column: top
        6: lambda a: a.swapaxes(0, 1)[::-1],  # first row: right side; first column: top
        7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],  # first row: right side; first column: bottom
        8: lambda a: a.swapaxes(0, 1)[:, ::-1],  # first row: left side; first column: bottom
    }[orientation](upright)


def with_orientation(orientation, file_format):
    stored = Image.fromarray(np.ascontiguousarray(as_stored(upright_blocks(), orientation)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(file_format, {})
    return encoded(stored, file_format, exif=exif, **options)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, file_format):
    data = with_orientation(orientation, file_format)
    result = open_image(data)
    assert np.abs(pixels(result).astype(int) - upright_blocks()).max() <= 6
    # opened once more, as an image handed on by a caller, it is not turned again
    assert np.array_equal(pixels(open_image(result)), pixels(result))
    assert np.array_equal(pixels(result), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_ignored_for_benchmarks(orientation):
    data = with_orientation(orientation, "PNG")
    expected = as_stored(upright_blocks(), orientation)
    assert np.array_equal(pixels(open_image(data, for_benchmark=True)), expected)


@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x12", b"Exif\0\0garbage" * 9],
)
def test_damaged_exif_does_not_spoil_the_image(exif):
    data = encoded(noise(), "PNG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(pixels(open_image(data)), np.asarray(noise()))


@pytest.mark.parametrize("value", [0, 9, 700])
def test_orientations_that_do_not_exist(value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert np.array_equal(pixels(open_image(encoded(noise(), "PNG", exif=exif))), np.asarray(noise()))


def test_threads_do_not_disturb_each_other():
    data = encoded(noise(), "PNG")
    filters = list(warnings.filters)
    results = []

    def work():
        results.extend(image_id(open_image(data)) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [image_id(noise())] * 40
    assert warnings.filters == filters


# --- identity and search -------------------------------------------------------------------------------------------


def test_image_id_depends_on_content_and_size_only():
    assert image_id(open_image(encoded(noise(), "PNG"))) == image_id(open_image(encoded(noise(), "BMP")))
    assert image_id(Image.new("RGB", (4, 6))) != image_id(Image.new("RGB", (6, 4)))
    changed = noise()
    changed.putpixel((0, 0), (1, 2, 3))
    assert image_id(changed) != image_id(noise())
    assert image_id(noise().convert("L")) == image_id(noise().convert("L").convert("RGB"))


def test_image_id_is_pinned():
    """Other ids would give everybody other views of their images."""
    assert image_id(Image.new("RGB", (2, 1), (1, 2, 3))) == "046abe00bdb35c7a425b899f17912f63"


def test_find_images(tmp_path):
    for name in ["b.JPG", "a.png", "notes.txt", ".hidden.png", "sub/c.webp", ".git/d.png", "sub/deep/e.tiff", "z"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    below = [tmp_path / name for name in ["a.png", "b.JPG", "sub/c.webp", "sub/deep/e.tiff"]]
    assert find_images([tmp_path]) == below
    assert find_images(str(tmp_path)) == below
    # files stay as they are, in the order given, even without an image's suffix
    assert find_images([tmp_path / "z", str(tmp_path / "sub"), tmp_path / "a.png"]) == [
        tmp_path / "z",
        *below[2:],
        below[0],
    ]
    assert find_images([]) == []


def test_find_images_follows_links_but_not_in_circles(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").touch()
    (tmp_path / "real" / "back").symlink_to(tmp_path / "real")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "real")
    assert find_images(tmp_path / "real") == [tmp_path / "real" / "a.png"]
    assert find_images(tmp_path / "set") == [tmp_path / "set" / "link" / "a.png"]


def test_find_images_errors(tmp_path):
    with pytest.raises(ImageError, match=r"nowhere: no such file or folder$"):
        find_images([tmp_path / "nowhere"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ImageError, match=r": folder contains no images \(\.bmp, .*\.webp\)$") as caught:
        find_images(tmp_path)
    assert caught.value.path == str(tmp_path)


def test_find_images_reports_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(ImageError) as caught:
        find_images(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no permission to read it"
