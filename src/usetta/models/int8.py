"""A vision transformer whose large matrix products are computed with 8-bit integers, for CPUs.

What makes that hard is a few channels of the residual stream that are ten or twenty times as large as the others and
leave hardly any levels for the rest. So the stream is turned by an orthogonal matrix that spreads each channel over all
of them. A layer norm is a subtraction of the mean, a division by the length and an affine map. The first goes with the
turn into the weights that write to the stream, the last with the turn back into the weights that read from it, and what
remains is exactly the same function, without outliers. No pictures are needed to calibrate it.

Activations have a scale for each token, so a picture's features do not depend on its company in a batch. They have 8
bits and weights have 7, because processors without VNNI add two products in 16 bits: 255 · 63 · 2 fits, twice that does
not. The sums are exact in 32 bits.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from usetta.models.base import ModelError
from usetta.models.clip import VisionTransformer
from usetta.models.transformer import QUICK, Block

_WEIGHT_LEVELS = 63
_TINY = 1e-12
_LOWEST_SILU = -0.27847  # the values of the two functions where they are lowest, rounded down
_LOWEST_GELU = -0.16998


class Int8VisionTransformer(nn.Module):
    """Almost the features (n, embed_dim) that `tower` gave to normalised pixels (n, 3, S, S); it loses its blocks."""

    precision = "int8"
    write: Tensor
    projection: Tensor
    bias: Tensor

    def __init__(self, tower: VisionTransformer) -> None:
        super().__init__()
        if not hasattr(torch.ops.onednn, "qlinear_prepack") or tower.projection.device.type != "cpu":
            raise ModelError("int8 needs a CPU, and a PyTorch that is built with oneDNN; use fp32 or bf16")
        turn = rotation(len(tower.projection))
        write = turn - turn.mean(dim=0)  # h @ write is h without its mean, turned
        blocks, tower.blocks = tower.blocks, nn.ModuleList()
        self.tower = tower
        self.blocks = nn.ModuleList(_Int8Block(block, turn, write) for block in blocks if isinstance(block, Block))
        self.eps = tower.ln_post.eps
        gain, shift, projection = (
            each.double() for each in (tower.ln_post.weight, tower.ln_post.bias, tower.projection)
        )
        self.register_buffer("write", write.float())
        self.register_buffer("projection", (turn.T @ (gain[:, None] * projection)).float())
        self.register_buffer("bias", (shift @ projection).float())

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.tower.embed_patches(pixels) @ self.write
        for place, block in enumerate(self.blocks):
            hidden = block(hidden, kept=1 if place == len(self.blocks) - 1 else hidden.shape[1])
        return (hidden[:, 0] * _inverse_length(hidden[:, 0], self.eps)) @ self.projection + self.bias


class _Int8Block(nn.Module):
    """A `Block` on the turned stream (n, tokens, width)."""

    def __init__(self, block: Block, turn: Tensor, write: Tensor) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.heads = attention.heads
        # QuickGELU is a SiLU between two factors, which weights can carry.
        self.quick = QUICK if mlp.is_quick else 1.0
        self.qkv = _Reader(attention.qkv, block.ln_1, turn)
        self.out = _Int8Linear(write.T @ attention.out.weight.double(), write.T @ attention.out.bias.double())
        self.up = _Reader(mlp.up, block.ln_2, turn, self.quick)
        self.down = _Int8Linear(
            write.T @ mlp.down.weight.double() / self.quick,
            write.T @ mlp.down.bias.double(),
            lowest=_LOWEST_SILU if mlp.is_quick else _LOWEST_GELU,
        )
        self.activation = _silu if mlp.is_quick else gelu

    def forward(self, hidden: Tensor, kept: int) -> Tensor:
        """The first `kept` hidden states (n, kept, width) after this block."""
        n, length, width = hidden.shape
        q, k, v = self.qkv(hidden).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q[:, :, :kept], k, v).transpose(1, 2).reshape(n, kept, width)
        hidden = hidden[:, :kept] + self.out(mixed)
        return hidden.add_(self.down(self.activation(self.up(hidden))))


class _Int8Linear(nn.Module):
    """x @ weight.T + bias for x (..., K) in float32, `weight` (N, K) and `bias` (N,) being given in double precision.

    lowest: the least that x can be, if it is not symmetric around zero.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, lowest: float | None = None) -> None:
        super().__init__()
        scale = weight.abs().amax(dim=1).clamp(min=_TINY) / _WEIGHT_LEVELS
        levels = (weight / scale[:, None]).round()
        if lowest is not None:
            bias = bias + lowest * scale * levels.sum(dim=1)
        self.lowest = lowest
        self.register_buffer("weight", levels.to(torch.int8))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias.float())
        self._packed = torch.ops.onednn.qlinear_prepack(self.weight, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.lowest is None:
            step = _largest(rows).div_(127).clamp_(min=_TINY)
            levels, zero = torch.mul(rows, step.reciprocal()).add_(128.5), 128
        else:
            step = rows.amax(dim=1, keepdim=True).sub_(self.lowest).div_(255).clamp_(min=_TINY)
            levels, zero = torch.sub(rows, self.lowest).mul_(step.reciprocal()).add_(0.5), 0
        return self._product(levels, zero, step).view(*x.shape[:-1], -1)

    def _product(self, levels: Tensor, zero: int, step: Tensor) -> Tensor:
        """(m, N), of non-negative levels (m, K) half a level too large, what counts as zero, and steps (m, 1)."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels.to(torch.uint8), 1.0, zero, self._packed, self.scale, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return torch.addcmul(self.bias, product, step, out=product)


class _Reader(_Int8Linear):
    """A layer norm and a linear layer, times `factor`, on the turned stream.

    Levels do not depend on the length of a token, so the layer norm's division enters with the step alone.
    """

    def __init__(self, linear: nn.Linear, norm: nn.LayerNorm, turn: Tensor, factor: float = 1.0) -> None:
        weight, bias = factor * linear.weight.double(), factor * linear.bias.double()
        super().__init__(weight * norm.weight.double() @ turn, bias + weight @ norm.bias.double())
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        largest = _largest(rows).clamp_(min=_TINY)
        levels = torch.mul(rows, 127 / largest).add_(128.5)
        step = largest.mul_(_inverse_length(rows, self.eps)).div_(127)
        return self._product(levels, 128, step).view(*x.shape[:-1], -1)


def rotation(width: int) -> Tensor:
    """An orthogonal matrix (width, width) in double precision whose entries are all about equally large."""
    odd = width // (width & -width)
    turn = torch.eye(odd, dtype=torch.float64) - 2 / odd
    while len(turn) < width:
        turn = torch.cat([torch.cat([turn, turn], dim=1), torch.cat([turn, -turn], dim=1)]) / 2**0.5
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0))
    return turn * (2.0 * signs - 1)


def _silu(x: Tensor) -> Tensor:
    return silu(x, inplace=True)


def _largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row (m, 1)."""
    return torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())


def _inverse_length(rows: Tensor, eps: float) -> Tensor:
    """What a layer norm multiplies rows (m, K) of zero mean by, (m, 1)."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return length.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
