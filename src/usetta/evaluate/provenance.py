"""What is needed to repeat a result beside the facts it depends on: versions, commit, machine, cost."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import usetta

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "numpy", "pillow", "safetensors", "tokenizers")


def provenance() -> dict[str, Any]:
    """Versions, commit and machine of this process, and when this was asked."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "usetta": usetta.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": os.cpu_count(),
        **_gpu(),
    }


def _gpu() -> dict[str, Any]:
    """Names of the GPUs, and versions of what drives them; nothing where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S603
        driver = output.split("\n")[0].strip() or None
    except (OSError, subprocess.SubprocessError):
        driver = None
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"gpu": names, "cuda": torch.version.cuda, "driver": driver}


@cache
def commit() -> str | None:
    """The commit that this code was checked out from, with a `+` if it was changed since; None for a package."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # else the checkout around it is of something else
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_device_memory(device: "torch.device") -> int | None:
    """The most memory, in bytes, that tensors have had on a GPU so far; for other devices that of this process."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()


def peak_memory() -> int | None:
    """The most memory, in bytes, that this process has had so far; None where the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
