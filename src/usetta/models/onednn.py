"""Blocks of a vision transformer in bf16 by oneDNN, for CPUs.

PyTorch reorders the weights of a linear layer for the processor at every call. Here they are reordered once, and what
follows a product is done while its results are still in a register: the activation, and the addition to the stream.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from usetta.models.clip import QUICK, Block, VisionTransformer

_packing = threading.Lock()


class _Packed(NamedTuple):
    """Weights (out, in) of the four linear layers of a block, each in an order of oneDNN's, and their biases."""

    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class PackedBlock(Block):
    """A `Block` with the same parameters, which are packed when it is first used."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        self.ln_1, self.attention, self.ln_2, self.mlp = block.ln_1, block.attention, block.ln_2, block.mlp
        self._packed: _Packed | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return super().forward(x)
        packed, heads = self._weights(), self.attention.heads
        n, length, width = x.shape
        qkv = _linear(self.ln_1(x), *packed.qkv).view(n, length, 3, heads, width // heads)
        mixed = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = _add_linear(mixed.transpose(1, 2).reshape(n, length, width), x, *packed.out)
        middle = _linear(self.ln_2(x), *packed.up, "swish" if self.mlp.is_quick else "gelu")
        return _add_linear(middle, x, *packed.down)

    def _weights(self) -> _Packed:
        with _packing:  # several threads encode
            if self._packed is None:
                # QuickGELU is a SiLU between two factors, which weights can carry.
                quick = QUICK if self.mlp.is_quick else 1.0
                up, bias = _pack(self.mlp.up, quick)
                scaled_bias = (quick * bias.float()).to(bias.dtype)
                down = _pack(self.mlp.down, 1 / quick)
                self._packed = _Packed(_pack(self.attention.qkv), _pack(self.attention.out), (up, scaled_bias), down)
            return self._packed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PackedBlock":
        self._packed = None  # PyTorch calls this for every `to`
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # oneDNN's order cannot be copied or pickled


def pack_blocks(tower: VisionTransformer) -> None:
    """Let a tower in bf16 compute this way on a CPU that has instructions for it."""
    for place, block in enumerate(tower.blocks):
        assert isinstance(block, Block)
        tower.blocks[place] = PackedBlock(block)


def _pack(linear: nn.Linear, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weight, times `factor`, and bias, which is for the caller to scale."""
    weight = linear.weight.detach()
    scaled = weight if factor == 1.0 else (factor * weight.float()).to(weight.dtype)
    return torch.ops.mkldnn._reorder_linear_weight(scaled, None), linear.bias.detach()  # noqa: SLF001


def _linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none") -> Tensor:
    """activation(x @ weight.T + bias), for x (..., in)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")  # noqa: SLF001
    return result


def _add_linear(x: Tensor, stream: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The stream (..., out) with a linear layer of x (..., in) added."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, stream, weight, bias, "add")  # noqa: SLF001
    return result
