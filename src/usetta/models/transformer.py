"""The pre-norm transformer block that both towers of CLIP are built from.

Queries, keys and values are one linear layer, so that a fast path can slice its weight; attention is PyTorch's
`scaled_dot_product_attention`, which picks a fused kernel where there is one.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from usetta.models.config import Activation

QUICK = 1.702
"""The factor in OpenAI's approximation of GELU."""


def quick_gelu(x: Tensor) -> Tensor:
    """OpenAI's approximation x·σ(1.702 x), which its weights were trained with and need.

    Written as a SiLU, which keeps one tensor for the backward pass where a product of two would keep both. Without a
    backward pass one new tensor is enough for all of it.
    """
    scaled = QUICK * x
    return silu(scaled) / QUICK if scaled.requires_grad else silu(scaled, inplace=True).div_(QUICK)


class Attention(nn.Module):
    """Multi-head self-attention over (n, L, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return joined


class MLP(nn.Module):
    """Two linear layers with a four times wider middle."""

    def __init__(self, width: int, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.is_quick = activation == "quick_gelu"
        self.activation = quick_gelu if self.is_quick else gelu

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(self.activation(self.up(x)))
        return projected


class Block(nn.Module):
    """Attention and MLP, each on normalised input and added to the stream (n, L, width)."""

    def __init__(self, width: int, heads: int, activation: Activation, *, causal: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        streamed: Tensor = x + self.mlp(self.ln_2(x))
        return streamed


def make_blocks(width: int, layers: int, heads: int, activation: Activation, *, causal: bool) -> nn.ModuleList:
    """A stack of equal blocks, to be run in order."""
    return nn.ModuleList(Block(width, heads, activation, causal=causal) for _ in range(layers))
