"""How an image tower computes: on which device, in which precision, and whether it is compiled.

Text towers stay in float32: the signs of their gradients decide how a prompt is tuned. Features are float32 in any
case, and models of different precision have different fingerprints. docs/performance.md has the costs of each
precision, and how far it agrees with fp32.
"""

import logging

import torch

from usetta.models.base import Model, ModelError
from usetta.models.clip import CLIP, VisionTransformer
from usetta.models.onednn import pack_blocks
from usetta.models.towers import TwoTowers

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
AUTO = "auto"
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_log = logging.getLogger("usetta")


def check_precision(precision: str) -> None:
    """Refuse what is neither a precision nor `auto`."""
    if precision not in (AUTO, *PRECISIONS):
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join((AUTO, *PRECISIONS))}")


def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bf16 that PyTorch uses."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not in every build of PyTorch
    return is_supported is not None and bool(is_supported())


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device that is meant: `auto` (or None) is CUDA, else MPS, else the CPU. An absent one is a ModelError."""
    if device is None or device == AUTO:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.device(device)
    except RuntimeError:  # with a list of twenty kinds that nobody here has
        raise ModelError(f"unknown device '{device}'; use auto, cpu, cuda or mps") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # The rest of torch's message is a long list of kernels.
        reason = (str(error).strip() or "torch gives no reason").splitlines()[0]
        raise ModelError(f"this machine has no device '{device}': {reason}") from None
    return torch.device(device)


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision that is meant. `auto` is fp16 on CUDA, bf16 on CPUs that have instructions for it, else fp32.

    bf16 is taken where it is fast because it costs next to nothing: it is about twice as fast as fp32, and its answers
    by the weak view agree on 499 of 500 images (docs/performance.md).
    """
    check_precision(precision)
    if precision != AUTO:
        return precision
    if device.type == "cuda":
        return "fp16"
    return "bf16" if device.type == "cpu" and computes_in_bf16() else "fp32"


def prepare(
    model: Model, precision: str = "fp32", *, compiled: bool = False, for_device: torch.device | None = None
) -> None:
    """Set how the image tower of `model` computes; it must be in float32, and on its device already.

    `for_device`: where copies of it will compute, if this one never does, which is only asked who it is.
    With `auto`, models that bring their own image tower (adapters, plug-ins) are left in fp32: agreement was measured
    for CLIP only.
    """
    check_precision(precision)
    if not isinstance(model, TwoTowers):
        if compiled or precision not in (AUTO, "fp32"):
            raise ModelError(f"{model.name} has its own image encoder, which runs in fp32 only, without --compile")
        return
    device = for_device or model.device
    if precision == AUTO:
        precision = _automatic(model, device)
    if precision == "int8":
        if compiled:
            raise ModelError("int8 cannot be combined with --compile")
        _add_int8(model)
    elif precision in _HALVES:
        _check_half(device, precision)
        model.image_tower.to(_HALVES[precision])
        if device.type == "cpu" and computes_in_bf16() and not compiled:
            _pack(model)
    if model.device.type == "cuda":
        # Convolutions are fastest in this layout there; PyTorch's types do not know this way to call `to`.
        model.image_tower.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if precision == "fp32":  # of which PyTorch would else keep 10 bits in convolutions, though not in products
            torch.backends.cudnn.allow_tf32 = False
    if compiled:
        _check_compiler(model.device)
        model.image_tower.compile()
    model.freeze().forget_fingerprint()


def _automatic(model: TwoTowers, device: torch.device) -> str:
    return resolve_precision(AUTO, device) if isinstance(model, CLIP) else "fp32"


def _add_int8(model: TwoTowers) -> None:
    if not isinstance(model, CLIP) or not isinstance(model.image_tower, VisionTransformer):
        raise ModelError(f"int8 works only with CLIP's vision transformers, not with {model.name}; use fp32 or bf16")
    from usetta.models.int8 import Int8Blocks

    model.int8_blocks = Int8Blocks(model.image_tower)


def _pack(model: TwoTowers) -> None:
    if isinstance(model.image_tower, VisionTransformer):
        pack_blocks(model.image_tower)


def _check_compiler(device: torch.device) -> None:
    """Compile something small, because a missing compiler would otherwise show at the first image only."""
    try:
        torch.compile(torch.neg)(torch.zeros(8, device=device))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise ModelError(f"PyTorch cannot compile on this machine, so leave out --compile ({cause})") from error


def _check_half(device: torch.device, precision: str) -> None:
    if device.type == "cpu":
        if precision == "fp16":
            raise ModelError("fp16 needs a GPU; on a CPU use fp32, bf16 or int8")
        if not computes_in_bf16():
            _log.warning("this processor has no bf16 instructions, so bf16 is slower than fp32 here; int8 is faster")
