"""The blocks of a vision transformer with their large matrix products in 8-bit integers, for CPUs.

What makes that hard is a few channels of the residual stream that are ten or twenty times as large as the others and
leave hardly any levels for the rest. So the stream is turned by an orthogonal matrix that spreads each channel over all
of them. A layer norm is a subtraction of the mean, a division by the length and an affine map. The first goes with the
turn into the weights that write to the stream, the last with the turn back into the weights that read from it, and what
remains is exactly the same function, without outliers. No images are needed to calibrate it.

Activations have a scale for each token, so an image's features do not depend on the other images of its batch. Both
they and the weights have 8 bits. But processors without VNNI add the products of two neighbours in 16 bits, so the
scale of a row of weights is chosen such that 255 times the sum of two neighbours of one sign fits: all sums are exact.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from usetta.models.base import ModelError
from usetta.models.clip import QUICK, Block, VisionTransformer
from usetta.models.precision import computes_in_bf16

_WEIGHT_LEVELS = 127
_PAIR_LEVELS = (2**15 - 1) // 255 - 1  # one less, because both are rounded
_TINY = 1e-12
_LOWEST_SILU = -0.27847  # the values of the two functions where they are lowest, rounded down
_LOWEST_GELU = -0.16998


class Int8Blocks(nn.Module):
    """Almost the features (n, embed_dim) that `tower` makes of its patch embeddings (n, tokens, width).

    The tower itself is kept by the model, for the images themselves.
    """

    write: Tensor
    projection: Tensor
    bias: Tensor

    def __init__(self, tower: VisionTransformer) -> None:
        super().__init__()
        if not hasattr(torch.ops.onednn, "qlinear_prepack") or tower.projection.device.type != "cpu":
            raise ModelError("int8 needs a CPU, and a PyTorch that is built with oneDNN; use fp32 or bf16")
        turn = rotation(len(tower.projection))
        write = turn - turn.mean(dim=0)  # h @ write is h without its mean, turned
        self.blocks = nn.ModuleList(
            _Int8Block(block, turn, write) for block in tower.blocks if isinstance(block, Block)
        )
        self.eps = tower.ln_post.eps
        gain, shift = tower.ln_post.weight.double(), tower.ln_post.bias.double()
        projection = tower.projection.double()
        self.register_buffer("write", write.float())
        self.register_buffer("projection", (turn.T @ (gain[:, None] * projection)).float())
        self.register_buffer("bias", (shift @ projection).float())

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden @ self.write
        for place, block in enumerate(self.blocks):
            # The last block computes the class token only, as the tower does.
            hidden = block(hidden, kept=1 if place == len(self.blocks) - 1 else hidden.shape[1])
        return (hidden[:, 0] * _inverse_length(hidden[:, 0], self.eps)) @ self.projection + self.bias


class _Int8Block(nn.Module):
    """A `Block` on the turned stream (n, tokens, width)."""

    def __init__(self, block: Block, turn: Tensor, write: Tensor) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.heads = attention.heads
        self.eps = block.ln_1.eps
        self.is_quick = mlp.is_quick
        # Queries, keys and values have 8 bits of their own, so bf16 loses little where a processor computes in it.
        self.attention_type = torch.bfloat16 if computes_in_bf16() else torch.float32
        # QuickGELU is a SiLU between two factors, which weights can carry.
        quick = QUICK if mlp.is_quick else 1.0
        self.qkv = _reader(attention.qkv, block.ln_1, turn)
        self.out = Int8Linear(write.T @ attention.out.weight.double(), write.T @ attention.out.bias.double())
        self.up = _reader(mlp.up, block.ln_2, turn, quick)
        self.down = Int8Linear(
            write.T @ mlp.down.weight.double() / quick, write.T @ mlp.down.bias.double(), _lowest(mlp.is_quick)
        )

    def forward(self, hidden: Tensor, kept: int) -> Tensor:
        """The first `kept` hidden states (n, kept, width) after this block."""
        n, length, width = hidden.shape
        levels, step = _read(hidden.view(-1, width), self.eps)
        qkv = scale_rows(self.qkv(levels), step, self.qkv.bias).to(self.attention_type)
        q, k, v = qkv.view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q[:, :, :kept], k, v).transpose(1, 2).reshape(-1, width)
        levels, step = round_rows(mixed.float())
        rows = _add(hidden[:, :kept].reshape(-1, width), self.out(levels), step, self.out.bias)
        levels, step = _read(rows, self.eps)
        levels, step = _activate(self.up(levels), step, self.up.bias, self.is_quick)
        return _add(rows, self.down(levels), step, self.down.bias).view(n, kept, width)


class Int8Linear(nn.Module):
    """Products of levels (m, K) with `weight` (N, K); the step of each row and `bias` are applied later.

    Levels count from 128, or from `lowest` if x cannot be less than that.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, lowest: float | None = None) -> None:
        super().__init__()
        scale = torch.maximum(weight.abs().amax(dim=1) / _WEIGHT_LEVELS, _largest_pair(weight) / _PAIR_LEVELS)
        scale = scale.clamp(min=_TINY)
        levels = (weight / scale[:, None]).round()
        if lowest is not None:
            bias = bias + lowest * scale * levels.sum(dim=1)
        self.zero = 128 if lowest is None else 0
        self.register_buffer("weight", levels.to(torch.int8))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias.float())
        self._packed = torch.ops.onednn.qlinear_prepack(self.weight, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def forward(self, levels: Tensor) -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, self.zero, self._packed, self.scale, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product


def _reader(linear: nn.Linear, norm: nn.LayerNorm, turn: Tensor, factor: float = 1.0) -> Int8Linear:
    """A linear layer, times `factor`, on the turned stream, with the affine part of the layer norm before it."""
    weight, bias = factor * linear.weight.double(), factor * linear.bias.double()
    return Int8Linear(weight * norm.weight.double() @ turn, bias + weight @ norm.bias.double())


# --- between the products --------------------------------------------------------------------------------------------


def _read(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Levels (m, K) of layer-normalised rows and the step between two, (m, 1).

    Levels do not depend on the length of a row, so the layer norm's division enters with the step alone.
    """
    largest = _largest(rows)
    levels = torch.mul(rows, 127 / largest).add_(128.5).to(torch.uint8)
    return levels, largest * _inverse_length(rows, eps) / 127


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (m, K) of rows, and the step between two (m, 1)."""
    largest = _largest(rows)
    return torch.mul(rows, 127 / largest).add_(128.5).to(torch.uint8), largest / 127


def scale_rows(product: Tensor, step: Tensor, bias: Tensor) -> Tensor:
    """The output of a linear layer (m, N), in the memory of its `product`: a new tensor costs more than the sums."""
    return torch.addcmul(bias, product, step, out=product)


def _add(rows: Tensor, product: Tensor, step: Tensor, bias: Tensor) -> Tensor:
    """The stream (m, N) with the output of a linear layer added, in the memory of its `product`."""
    return scale_rows(product, step, bias).add_(rows)


def _activate(product: Tensor, step: Tensor, bias: Tensor, is_quick: bool) -> tuple[Tensor, Tensor]:
    """Levels (m, N) of a linear layer's output after the activation, and the step between two (m, 1)."""
    x, lowest = scale_rows(product, step, bias), _lowest(is_quick)
    x = silu(x, inplace=True) if is_quick else gelu(x)
    step = x.amax(dim=1, keepdim=True).sub_(lowest).div_(255)
    return x.sub_(lowest).mul_(step.reciprocal()).add_(0.5).to(torch.uint8), step


def _lowest(is_quick: bool) -> float:
    return _LOWEST_SILU if is_quick else _LOWEST_GELU


def _largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row (m, 1), never zero."""
    return torch.maximum(rows.amax(dim=1, keepdim=True), -rows.amin(dim=1, keepdim=True)).clamp(min=_TINY)


def _inverse_length(rows: Tensor, eps: float) -> Tensor:
    """What a layer norm multiplies rows (m, K) of zero mean by, (m, 1)."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (length.square() / rows.shape[1] + eps).rsqrt()


# --- weights ---------------------------------------------------------------------------------------------------------


def _largest_pair(weight: Tensor) -> Tensor:
    """The largest sum, in absolute value, of two neighbours of the same sign in each row (N,)."""
    even, odd = weight[:, :-1:2], weight[:, 1::2]
    return torch.where(even * odd > 0, even + odd, 0).abs().amax(dim=1)


def rotation(width: int) -> Tensor:
    """An orthogonal matrix (width, width) in double precision whose entries are all about equally large."""
    odd = width // (width & -width)
    turn = torch.eye(odd, dtype=torch.float64) - 2 / odd
    while len(turn) < width:
        turn = torch.cat([torch.cat([turn, turn], dim=1), torch.cat([turn, -turn], dim=1)]) / 2**0.5
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0))
    return turn * (2.0 * signs - 1)
