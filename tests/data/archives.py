"""Archives in memory."""

import io
import tarfile
import zipfile
from collections.abc import Mapping


def tar_of(files: Mapping[str, bytes], compression: str = "") -> bytes:
    """A tar of `files`, compressed with gz, bz2, xz or not at all."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zip_of(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as members:
        for name, content in files.items():
            members.writestr(zipfile.ZipInfo(name), content)  # without the time, so that equal files are equal archives
    return packed.getvalue()
