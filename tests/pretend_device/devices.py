"""Pretended GPUs: tensors that say they are on `cuda:0`, `cuda:1` or `mps`, and compute on the CPU.

They show what only a GPU would: tensors of two devices in one operation raise, `mps` refuses float64, a tensor that one
stream uses before another has finished it raises. And they count what makes a GPU wait: launches, and synchronisations
between host and device (reads, and uploads that are not asynchronous). They say nothing about speed or rounding.

This module must be imported before torch, whose C++ asks for devices when it is loaded; `g++` compiles the answers
(`guards.cpp`). Then everything inside `with pretended():` sees the devices, also in threads that it starts.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "torch" in sys.modules:
    raise ImportError("pretended devices must be imported before torch")

_TORCH = Path(importlib.util.find_spec("torch").origin).parent
_SOURCE = Path(__file__).with_name("guards.cpp")


def _compiled() -> Path:
    name = hashlib.sha256(_SOURCE.read_bytes() + str(_TORCH).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"usetta-guards-{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # two processes may compile at a time
            made = Path(folder) / library.name
            options = ["-shared", "-fPIC", "-std=c++20", f"-I{_TORCH / 'include'}"]
            subprocess.run(["g++", *options, str(_SOURCE), "-o", str(made)], check=True)
            made.replace(library)
    return library


for _name in ("torch_global_deps", "c10", "torch_cpu"):
    ctypes.CDLL(str(_TORCH / "lib" / f"lib{_name}.so"), mode=ctypes.RTLD_GLOBAL)
_GUARDS = ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL)

# ruff: noqa: E402
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

torch.cuda._lazy_init = lambda: None
torch.__future__.set_overwrite_module_params_on_conversion(
    True
)  # `module.to` cannot swap data of another class in place

PEAK_MEMORY = 123_456_789
"""What the pretended GPU says its peak was."""


class MixedDevicesError(RuntimeError):
    """Tensors of two devices in one operation."""


class RaceError(RuntimeError):
    """A stream uses what another stream may not have finished."""


@dataclass
class Counts:
    """What happened on all devices since the last `clear`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that a device would run, by name; views are free."""
    syncs: Counter[str] = field(default_factory=Counter)
    """What makes the host wait for a device, by reason."""
    uploaded: int = 0
    """Bytes from the host to a device."""
    events: list[str] = field(default_factory=list)
    """Names of all launches and syncs in their order."""

    def clear(self) -> None:
        self.__init__()

    def launch(self, name: str) -> None:
        self.launches[name] += 1
        self.events.append(name)

    def sync(self, reason: str) -> None:
        self.syncs[reason] += 1
        self.events.append(f"sync: {reason}")


COUNTS = Counts()


# --- streams: which work is known to be done when --------------------------------------------------------------------


class PretendedStream:
    """Counts its launches; `done` is how many of another stream's are over before the next of this one starts."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = _indexed(device or "cuda")
        self.now = 0
        self.done: dict[PretendedStream, int] = {}

    def record_event(self, event: "PretendedEvent | None" = None) -> "PretendedEvent":
        event = event or PretendedEvent()
        event.known = {**self.done, self: self.now}
        return event

    def wait_event(self, event: "PretendedEvent") -> None:
        for stream, now in event.known.items():
            self.done[stream] = max(now, self.done.get(stream, 0))

    def wait_stream(self, other: "PretendedStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        COUNTS.sync("stream")
        _HOST.wait_stream(self)


class PretendedEvent:
    """What was done when it was recorded."""

    known: dict[PretendedStream, int]


_DEFAULT: dict[torch.device, PretendedStream] = {}
_CURRENT = threading.local()


def _current_stream(device: Any = None) -> PretendedStream:
    device, stream = _indexed(device or "cuda"), getattr(_CURRENT, "stream", None)
    if stream is not None and stream.device == device:
        return stream
    return _DEFAULT.setdefault(device, PretendedStream(device))


@contextlib.contextmanager
def _on_stream(stream: PretendedStream | None) -> Iterator[None]:
    before, _CURRENT.stream = getattr(_CURRENT, "stream", None), stream
    try:
        yield
    finally:
        _CURRENT.stream = before


# --- tensors ---------------------------------------------------------------------------------------------------------


class DeviceTensor(Tensor):
    """A tensor on a pretended device. `on_host` has its values, `written` who wrote them and when."""

    on_host: Tensor
    written: tuple[PretendedStream, int]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_host: Tensor, device: torch.device) -> "DeviceTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            layout=on_host.layout,
            device=device,
        )
        tensor.on_host = on_host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.device}, {self.dtype}, {tuple(self.shape)})"

    def tolist(self) -> Any:
        _read("tolist", self)
        return self.on_host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def untyped_storage(self) -> Any:
        return self.on_host.untyped_storage()

    def record_stream(self, stream: PretendedStream) -> None:
        """Only concerns when memory is used again."""


_PRETENDED = {"cuda", "mps"}
_FREE = """
    empty empty_strided empty_like new_empty new_empty_strided detach detach_ alias lift lift_fresh view _unsafe_view
    _reshape_alias as_strided split split_with_sizes unbind chunk _local_scalar_dense
"""
"""Operations that neither launch anything nor are known to PyTorch as views."""
_READS = """
    _local_scalar_dense nonzero masked_select equal unique_dim _unique _unique2 unique_consecutive repeat_interleave
    _linalg_svd _linalg_eigh
"""
"""Operations whose result the host waits for, some because it decides a shape."""
_INDEXING = "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put"
_STRICT = """
    cat stack mm bmm addmm baddbmm mv dot linear index_add index_add_ index_copy index_copy_ index_select gather scatter
    scatter_ scatter_add scatter_add_ scatter_reduce_ embedding convolution native_layer_norm
"""
"""Operations that take no scalar of the host beside tensors of a device, as element-wise ones do."""
_FREE, _READS, _INDEXING, _STRICT = (set(names.split()) for names in (_FREE, _READS, _INDEXING, _STRICT))


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type in _PRETENDED


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(device.type, device.index or 0) if device.type in _PRETENDED else device


def _plain(tensor: Tensor) -> Tensor:
    return tensor.on_host if isinstance(tensor, DeviceTensor) else tensor


_HOST = PretendedStream()
"""What the host has waited for is over for everybody."""


def _wrapped(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type not in _PRETENDED:
        return tensor
    if device.type == "mps" and tensor.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    wrapped = DeviceTensor(tensor, device)
    stream = _current_stream(device)
    wrapped.written = stream, stream.now
    return wrapped


def _check_race(tensor: DeviceTensor, name: str) -> None:
    writer, when = tensor.written
    reader = _current_stream(tensor.device)
    if writer is not reader and max(reader.done.get(writer, 0), _HOST.done.get(writer, 0)) < when:
        raise RaceError(f"{name} uses {tensor} on a stream that has not waited for the one that writes it")


def _read(reason: str, tensor: DeviceTensor) -> None:
    _check_race(tensor, reason)
    COUNTS.sync(reason)
    _HOST.wait_stream(_current_stream(tensor.device))


def _copied(source: Tensor, to: torch.device, non_blocking: bool) -> None:
    if isinstance(source, DeviceTensor) and to.type not in _PRETENDED:
        _read("read", source)
    elif not isinstance(source, DeviceTensor) and to.type in _PRETENDED:
        COUNTS.uploaded += source.nbytes
        if not non_blocking:
            COUNTS.sync("upload")
    elif to.type in _PRETENDED:
        COUNTS.launch("copy")
        if source.device != to:
            _current_stream(to).wait_stream(_current_stream(source.device))


def _execute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    for tensor in on_device:
        _check_race(tensor, name)
    if name == "_to_copy":
        return _to_copy(func, tensors[0], kwargs)
    if name == "copy_":
        target, source = args[:2]
        _copied(source, target.device, bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
        func(_plain(target), _plain(source))
        if isinstance(target, DeviceTensor):
            target.written = _now(target.device)
        return target
    _check_devices(name, args, tensors, on_device)
    device = on_device[0].device if on_device else torch.device("cpu")
    if _is_pretended(kwargs.get("device")):
        device = _indexed(kwargs["device"])
    if on_device and (name in _READS or (name in _INDEXING and _has_mask(args[1]))):
        _read(name, on_device[0])
    is_launch = device.type in _PRETENDED and not func.is_view and name not in _FREE
    if is_launch:
        COUNTS.launch(name)
        _current_stream(device).now += 1
    plain_args, plain_kwargs = tree_unflatten([_plain(v) if isinstance(v, Tensor) else v for v in flat], spec)
    if "device" in plain_kwargs:
        plain_kwargs["device"] = "cpu"
    plain_kwargs.pop("pin_memory", None)
    own = {id(_plain(tensor)): tensor for tensor in tensors}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensor = own.get(id(value))
        if tensor is None:
            tensor = _wrapped(value, device)
            if not is_launch and on_device:  # a view is as old as what it shows
                tensor.written = on_device[0].written
        elif isinstance(tensor, DeviceTensor) and is_launch:
            tensor.written = _now(device)
        return tensor

    return tree_map(back, func(*plain_args, **plain_kwargs))


def _now(device: torch.device) -> tuple[PretendedStream, int]:
    stream = _current_stream(device)
    return stream, stream.now


def _to_copy(func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    to = _indexed(kwargs.get("device") or source.device)
    _copied(source, to, bool(kwargs.get("non_blocking")))
    others = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    return _wrapped(func(_plain(source), **others), to)


def _check_devices(name: str, args: Any, tensors: list[Tensor], on_device: list[DeviceTensor]) -> None:
    if not on_device:
        return
    host = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if name in _INDEXING and isinstance(args[0], DeviceTensor):  # indices may come from the host
        for index in args[1]:
            if isinstance(index, Tensor) and not isinstance(index, DeviceTensor):
                _copied(index, args[0].device, False)
                host = [tensor for tensor in host if tensor is not index]
    if len({tensor.device for tensor in on_device}) > 1 or any(t.dim() or name in _STRICT for t in host):
        places = ", ".join(f"{tensor.device} {tuple(tensor.shape)}" for tensor in tensors)
        raise MixedDevicesError(f"Expected all tensors to be on the same device, but {name} got {places}")


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Dispatch(TorchDispatchMode):
    """Makes tensors on a device, which no tensor that is there already would see."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_pretended(kwargs.get("device")) or any(
            isinstance(v, DeviceTensor) for v in tree_flatten((args, kwargs))[0]
        ):
            return _execute(func, args, kwargs)
        if kwargs.get("pin_memory"):  # any memory will do
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """One launch forward and one backward, as kernels for attention have."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        _check_devices("attention", (), [q, k, v], [q, k, v])
        COUNTS.launch("attention")
        return _wrapped(_attention(q.on_host, k.on_host, v.on_host, is_causal=causal), q.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        COUNTS.launch("attention_backward")
        leaves = [tensor.on_host.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            mixed = _attention(*leaves, is_causal=ctx.causal)
        gradients = torch.autograd.grad(mixed, leaves, grad.on_host)
        return (*(_wrapped(own.detach(), grad.device) for own in gradients), None)


_attention = torch.nn.functional.scaled_dot_product_attention


class _Functions(TorchFunctionMode):
    """Functions that decide by themselves what to do on a device, before anything is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _attention and isinstance(args[0], DeviceTensor):
            return _FusedAttention.apply(*args[:3], kwargs.get("is_causal", False))
        if func is Tensor.pin_memory:
            return args[0].clone()
        return func(*args, **kwargs)


_PATCHES: dict[Any, dict[str, Any]] = {
    torch.cuda: {
        "device_count": lambda: 2,
        "synchronize": lambda device=None: COUNTS.sync("synchronize"),
        "max_memory_allocated": lambda device=None: PEAK_MEMORY,
        "get_device_properties": lambda device: SimpleNamespace(name="pretended GPU", total_memory=8 * 2**30),
        "get_device_name": lambda device: "pretended GPU",
        "Stream": PretendedStream,
        "Event": PretendedEvent,
        "stream": _on_stream,
        "current_stream": _current_stream,
    },
    torch.mps: {"synchronize": lambda: COUNTS.sync("synchronize")},
}


@contextlib.contextmanager
def pretended(kind: str = "cuda") -> Iterator[Counts]:
    """Two CUDA devices, or with `mps` one of those; what happens on them is counted."""
    import torch.optim.optimizer as optimizers

    _GUARDS.set_accelerator(kind == "mps")
    available = {
        torch.cuda: {"is_available": lambda: kind == "cuda"},
        torch.backends.mps: {"is_available": lambda: kind == "mps"},
    }
    run_thread = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Functions(), _Dispatch():
            run_thread(thread)

    with contextlib.ExitStack() as stack:
        for module, names in (*_PATCHES.items(), *available.items(), (threading.Thread, {"run": run})):
            for name, value in names.items():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        # Optimisers take many parameters at once if they know their class.
        optimizers._foreach_supported_types.append(DeviceTensor)
        stack.callback(optimizers._foreach_supported_types.remove, DeviceTensor)
        # So that `torch.tensor(values, device=...)` makes its tensor on the host and uploads it, where it is seen.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch())
        COUNTS.clear()
        yield COUNTS
