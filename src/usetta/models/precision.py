"""How an image tower computes: its precision, and whether it is compiled.

Text towers stay in float32, since of their gradients the signs decide. Features are float32 in any case, and the
fingerprint of a model tells precisions apart. docs/performance.md has their costs, and how far they agree with fp32.
"""

import logging

import torch
from torch import nn

from usetta.models.base import Model, ModelError
from usetta.models.clip import CLIP, VisionTransformer
from usetta.models.towers import TwoTowers

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_log = logging.getLogger("usetta")


def check_precision(precision: str) -> None:
    """Refuse what is no precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known are {', '.join(PRECISIONS)}")


def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bf16 that PyTorch uses."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not in every build of PyTorch
    return ask is not None and bool(ask())


def prepare(model: Model, precision: str = "fp32", *, compiled: bool = False) -> None:
    """Let the image tower of `model`, which is in float32 and where it shall be, compute so from now on."""
    check_precision(precision)
    if isinstance(model, TwoTowers):
        if precision == "int8":
            if compiled:
                raise ModelError("int8 is not for torch.compile, which would gain next to nothing: leave that out")
            model.image_tower = _int8(model)
        elif precision in _HALVES:
            _check_half(model, precision)
            model.image_tower.to(_HALVES[precision])
        if model.device.type == "cuda":
            # How convolutions are fastest there; PyTorch's types do not know of this way to call `to`.
            model.image_tower.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compiled:
            _check_compiler(model.device)
            model.image_tower.compile()
        model.freeze().forget_fingerprint()
    elif compiled or precision != "fp32":
        raise ModelError(f"{model.name} brings its own image tower, which is left as it is: use fp32, not compiled")


def _int8(model: TwoTowers) -> nn.Module:
    if not isinstance(model, CLIP) or not isinstance(model.image_tower, VisionTransformer):
        raise ModelError(f"int8 is for CLIP's vision transformers, and {model.name} is none; use fp32 or bf16")
    from usetta.models.int8 import Int8VisionTransformer

    return Int8VisionTransformer(model.image_tower)


def _check_compiler(device: torch.device) -> None:
    """Compile something small, because a compiler that is missing would be told only with the first image."""
    try:
        torch.compile(torch.neg)(torch.zeros(8, device=device))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise ModelError(f"PyTorch cannot compile here, so leave the image tower as it is ({cause})") from error


def _check_half(model: TwoTowers, precision: str) -> None:
    if model.device.type == "cpu":
        if precision == "fp16":
            raise ModelError("fp16 is for GPUs; on a CPU use fp32, bf16 or int8")
        if not computes_in_bf16():
            _log.warning("this processor has no instructions for bf16: it is slower than fp32 here, and int8 faster")
