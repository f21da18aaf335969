"""Learned contexts as files: CoOp's own checkpoints, and safetensors with what is needed to know where they came from.

A checkpoint of CoOp is a pickle of its whole training: beside the context it holds the optimiser, and a scheduler that
holds the optimiser as an object once more. None of that is needed, so the classes that such files are known to name are
replaced by classes that do nothing in PyTorch's restricted unpickler; every other name is refused, and no code is run.

Contexts of two text towers often have the same shape, and the wrong one gives plausible but bad answers. Both kinds of
file therefore identify their tower, by the embedding of its first token.
"""

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from usetta import __version__
from usetta.files import write_atomically
from usetta.models.base import Model, ModelError, TextTower
from usetta.prompts import DEFAULT_TEMPLATE

Tensors = dict[str, Tensor]

CONTEXT, START, LOSSES, MOMENTUM = "context", "start_token", "losses", "momentum"
"""The tensors of our files: the context (n, W); the embedding (W,) of the tower's first token; the mean loss of each
epoch (epochs,); and, as long as a training is not finished, the optimiser's momentum (n, W)."""

_COOP = {"ctx", "token_prefix", "token_suffix"}
"""The tensors of CoOp's files: the context, and the embeddings around it for the classes it was trained on."""

_DAMAGE = (
    *(RuntimeError, ValueError, EOFError, LookupError, AssertionError, TypeError, AttributeError),
    *(MemoryError, OverflowError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError),
)
"""What PyTorch raises on files that are cut off, altered, or something else altogether."""


def load_context(path: str | PathLike[str], model: Model | None = None) -> Tensor:
    """The context (n, W) in a checkpoint of CoOp or a file of `save_context`, in float32 (float64 stays).

    With `model`, a context of another text tower is refused.
    """
    tensors, metadata = read_context_file(Path(path))
    if MOMENTUM in tensors:
        done = f"epoch {len(tensors.get(LOSSES, ()))} of {metadata.get('epochs')}"
        raise ModelError(f"the training of {path} is not finished ({done}): rerun it to finish")
    if model is not None:
        _check_tower(tensors, metadata, model, path)
    return tensors[CONTEXT]


def _check_tower(tensors: Tensors, metadata: dict[str, str], model: Model, path: str | PathLike[str]) -> None:
    """Refuse a context of another text tower."""
    width, own = tensors[CONTEXT].shape[1], start_token(model.text)
    if width != len(own):
        raise ModelError(
            f"{path} was learned for a text encoder of width {width}, but {model.name} has width {len(own)}"
        )
    start = tensors.get(START, own).to(own)
    # The tolerance lets the same tower in another precision pass; two different towers are far apart.
    if start.shape != own.shape or not torch.allclose(start, own, rtol=0.02, atol=0.02 * float(own.abs().mean())):
        learned = f" (it was learned with {metadata['model']})" if "model" in metadata else ""
        raise ModelError(f"{path} was learned for a different text encoder than that of {model.name}{learned}")


def save_context(
    path: str | PathLike[str], context: Tensor, metadata: Mapping[str, object] | None = None, **more: Tensor
) -> None:
    """Write `context` (n, W) with `metadata` and `more` tensors, as a whole or not at all.

    Metadata with a meaning here: `template`, with which the context was learned (see `template_of`), and `model`.
    """
    _check(context, "the context")
    texts = {key: str(value) for key, value in {"usetta": __version__, **(metadata or {})}.items()}
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in {CONTEXT: context, **more}.items()}
    write_atomically(Path(path), save(tensors, metadata=texts))


def template_of(path: str | PathLike[str]) -> str:
    """The template that the context in a file belongs to: the one it was learned with, or one of the same length."""
    tensors, metadata = read_context_file(Path(path))
    return metadata.get("template") or template_for(tensors[CONTEXT])


def template_for(context: Tensor) -> str:
    """A template with as many words before the name as `context` (n, W) has tokens; which words does not matter."""
    usual = len(DEFAULT_TEMPLATE.partition("{}")[0].split())
    return DEFAULT_TEMPLATE if len(context) == usual else " ".join(["X"] * len(context)) + " {}."


def start_token(tower: TextTower) -> Tensor:
    """The embedding (W,) of the first token of a text, which distinguishes one tower from another."""
    with torch.no_grad():
        embedding = tower.embed(tower.tokenize([""])[:, :1])[0, 0]
    return embedding.to(torch.promote_types(embedding.dtype, torch.float32))


def read_context_file(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a file under our names, the context checked, and its metadata (empty for CoOp's own files)."""
    if not path.is_file():
        raise ModelError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith(b"version https://git-lfs"):
            raise ModelError(f"{path} is a git-lfs pointer, not the file: run `git lfs pull` where it came from")
        # A file of safetensors starts with eight bytes of length and then JSON; no pickle has a brace there.
        tensors, metadata = _read_safetensors(path) if head[8:9] == b"{" else (_read_pickle(path), {})
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged, perhaps cut off while downloading ({error})") from None
    except _DAMAGE as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise ModelError(
                f"{path} contains {refused[1]}, which CoOp checkpoints do not have and which could run code: the file "
                "is not used"
            ) from None
        raise ModelError(f"{path} is damaged, or not a file with a learned context") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error})") from None
    tensors[CONTEXT] = _check(tensors[CONTEXT], str(path))
    return tensors, metadata


def _read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is not a mapping)
        metadata = dict(file.metadata() or {})
    if CONTEXT in tensors:
        return tensors, metadata
    return _from_coop(tensors, path), metadata


def _read_pickle(path: Path) -> Tensors:
    with torch.serialization.safe_globals(_INERT):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise ModelError(f"{path} contains a {type(content).__name__}, not a context")
    return _from_coop({str(key): value for key, value in content.items()}, path)


def _from_coop(state: Mapping[str, Any], path: Path) -> Tensors:
    """The state dict of CoOp's prompt learner under our names."""
    if "ctx" not in state:
        raise ModelError(f"{path} contains no context: it has neither 'ctx' (as CoOp calls it) nor '{CONTEXT}'")
    if not isinstance(state["ctx"], Tensor):
        raise ModelError(f"{path} contains no context: its 'ctx' is a {type(state['ctx']).__name__}")
    if surplus := sorted(state.keys() - _COOP):
        raise ModelError(
            f"{path} contains more than a context ({', '.join(surplus[:3])}): it belongs to another method, and its "
            "context cannot be used alone"
        )
    tensors = {CONTEXT: state["ctx"]}
    prefix = state.get("token_prefix")
    if isinstance(prefix, Tensor) and prefix.ndim == 3 and prefix.numel() and prefix.shape[2] == state["ctx"].shape[-1]:
        tensors[START] = prefix[0, 0]
    return tensors


def _check(context: Tensor, source: str) -> Tensor:
    """`context` in at least single precision; an error if it is none."""
    if context.ndim == 3:
        raise ModelError(
            f"{source} has a context for each of {len(context)} classes; only one shared by all classes is supported"
        )
    if context.ndim != 2 or not context.numel() or not context.is_floating_point():
        raise ModelError(
            f"{source} must be a context of floats (tokens, width), not {context.dtype} of shape {tuple(context.shape)}"
        )
    if not context.isfinite().all():
        raise ModelError(f"{source} has NaN or infinite values in its context")
    return context.detach().to(torch.promote_types(context.dtype, torch.float32))


class _Inert:
    """Takes any arguments and any state, and does nothing."""

    def __new__(cls, *args: object) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Forget it."""


class _InertMapping(_Inert):
    """Becomes a plain dict, since the unpickler sets items of nothing else."""

    def __new__(cls, *args: object) -> Any:
        return {}


def _inert_class(name: str, kind: type[_Inert]) -> Any:
    """A class that the unpickler takes for the one called `name`."""
    module, _, own = name.rpartition(".")
    return type(own, (kind,), {"__module__": module})


_INERT = [
    _inert_class("collections.defaultdict", _InertMapping),
    *(
        _inert_class(name, _Inert)
        for name in (
            "torch.optim.lr_scheduler.CosineAnnealingLR",  # what Dassl's warm-up scheduler continues with
            "torch.optim.sgd.SGD",  # which that one holds
            "builtins.dict",  # the default of the optimiser's state
            "numpy.core.multiarray.scalar",  # validation results
            "numpy._core.multiarray.scalar",
            "numpy.dtype",
        )
    ),
]
