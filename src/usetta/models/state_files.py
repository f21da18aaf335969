"""The tensors in a file of weights: safetensors, a pickle of tensors, or a TorchScript archive. Nothing in it is run.

A pickle is read with `weights_only=True`. OpenAI published CLIP as TorchScript: `torch.jit.load` would compile and may
run the code inside, and `torch.load` refuses such files, so they are read here as what they are, a zip with a pickled
tree of modules and one entry per storage. The unpickler knows how to rebuild tensors and to hold attributes, and
refuses every other name.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from usetta.models.base import ModelError
from usetta.models.config import Activation
from usetta.models.layouts import State

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_state(path: Path) -> State:
    """The state dict in a safetensors file, a pickle of tensors (nothing else is read) or a TorchScript archive."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from None
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` where it came from")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if is_torchscript(path):
            return read_torchscript(path)
        return _unwrap(torch.load(path, map_location="cpu", weights_only=True), path)
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged, perhaps cut off while downloading ({error})") from None
    except pickle.UnpicklingError:  # its message advises to load the file unsafely
        raise ModelError(
            f"{path} cannot be loaded safely: it contains other objects than tensors, or is not a weights file"
        ) from None
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle makes PyTorch raise almost anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path} is damaged or not a weights file ({reason})") from None


def _unwrap(content: object, path: Path) -> State:
    """The state dict proper: training checkpoints hold it under `state_dict`, with `module.` before every key."""
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"{path} contains no state dict (a mapping of names to tensors)")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


# --- TorchScript ------------------------------------------------------------------------------------------------------


class _Module:
    """A scripted module or object: nothing but its attributes."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


def is_torchscript(path: Path) -> bool:
    """Whether `path` is a TorchScript archive: a zip that carries code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name or name.endswith("/constants.pkl") for name in archive.namelist())


def read_torchscript(path: Path) -> State:
    """The parameters and buffers of the archive, on the CPU, under the names `state_dict()` would give them."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickled) != 1:
                raise ModelError(f"{path} is not a TorchScript archive: it has {len(pickled)} entries named data.pkl")
            root = _Reader(archive, pickled[0]).load()
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise ModelError(f"{path} is a damaged TorchScript archive, or contains more than tensors: {error}") from None
    state: State = {}
    _collect(root, "", state)
    return state


def scripted_activation(path: Path) -> Activation | None:
    """Which activation the code in the archive calls, read as text: CLIP uses a sigmoid nowhere but in QuickGELU."""
    with zipfile.ZipFile(path) as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if "/code/" in name and name.endswith(".py"))
    if b"torch.gelu(" in code:
        return "gelu"
    return "quick_gelu" if b"torch.sigmoid(" in code else None


def _collect(module: object, prefix: str, state: State) -> None:
    """Add the tensors of a module and its children to `state`."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            state[prefix + name] = value
        elif isinstance(value, _Module):
            _collect(value, f"{prefix}{name}.", state)


class _Reader(pickle.Unpickler):
    """Rebuilds tensors from the storages of one archive."""

    def __init__(self, archive: zipfile.ZipFile, pickled: str) -> None:
        super().__init__(io.BytesIO(archive.read(pickled)))
        self._archive = archive
        self._folder = pickled.removesuffix(".pkl")
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Module
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        if (module, name) == ("torch.jit._pickle", "restore_type_tag"):
            return _first
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _device, _length = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"unknown storage {kind!r}")
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._folder}/{key}"))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.as_strided(storage, size, stride, offset).contiguous()


def _first(value: Any, *_: Any) -> Any:
    return value


_REBUILD: dict[str, Callable[..., Any]] = {"_rebuild_tensor_v2": _rebuild_tensor, "_rebuild_parameter": _first}
