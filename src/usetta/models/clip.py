"""CLIP in plain PyTorch: the vision transformer, the text transformer, and the pair of them as a `base.Model`.

Written here rather than taken from a library because the test-time methods reach inside: prompt tuning feeds its own
embeddings into the text tower, a fast path (`packed`) walks `text.blocks` with packed tokens, and TTL runs the last
image blocks again from stored hidden states, with queries and values changed (`LastBlocks`).

Both towers are made of one pre-norm block. Its queries, keys and values are one linear layer, whose weight a fast path
can slice, and its attention is `scaled_dot_product_attention`, which picks a fused kernel where PyTorch has one.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, normalize, scaled_dot_product_attention, silu

from usetta.models.base import Familiarity, no_last_blocks
from usetta.models.config import Activation, CLIPConfig, TextConfig, ViTConfig
from usetta.models.parallel import map_chunks
from usetta.models.resnet import ModifiedResNet
from usetta.models.tokenizer import CLIPTokenizer, default_tokenizer
from usetta.models.towers import TwoTowers

QUICK = 1.702
"""The factor in OpenAI's approximation of GELU."""

LAST_BLOCKS = 3
"""How many blocks of a vision transformer `LastBlocks` holds: as many as TTL adapts."""


def quick_gelu(x: Tensor) -> Tensor:
    """OpenAI's approximation x·σ(1.702 x), which its weights were trained with and need.

    Written as a SiLU, which keeps one tensor for the backward pass where a product of two would keep both. Without a
    backward pass it works in place, in one new tensor.
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


class VisionTransformer(nn.Module):
    """Normalised pixels (n, 3, S, S) to features (n, embed_dim), not of unit length.

    Only the class token is pooled, so the last block computes no other; that is exact, and saves 7 % of ViT-B/16.
    """

    def __init__(self, config: CLIPConfig, vision: ViTConfig) -> None:
        super().__init__()
        width = vision.width
        self.patches = nn.Conv2d(3, width, vision.patch_size, stride=vision.patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(vision.tokens, width))
        self.ln_pre = nn.LayerNorm(width)
        self.blocks = make_blocks(width, vision.layers, vision.heads, config.activation, causal=False)
        self.ln_post = nn.LayerNorm(width)
        self.projection = nn.Parameter(torch.zeros(width, config.embed_dim))

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Hidden states before the first block (n, tokens, width), the class token first."""
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(pixels.shape[0], 1, -1)  # not len(), which an export would take as fixed
        hidden: Tensor = self.ln_pre(torch.cat([first, patches], 1) + self.positional_embedding)
        return hidden

    def pool(self, hidden: Tensor) -> Tensor:
        """Features (n, embed_dim) of the hidden states after the last block (n, 1 or more, width)."""
        pooled: Tensor = self.ln_post(hidden[:, 0]) @ self.projection
        return pooled

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.embed_patches(pixels)
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return self.pool(_run(self.blocks[-1], hidden, kept=1))


class LowRank(NamedTuple):
    """An addition to a linear layer of width W: x @ down @ up."""

    down: Tensor
    """(W, r)"""
    up: Tensor
    """(r, W)"""


class LoraDelta(NamedTuple):
    """What is added to the queries and to the values of a block's attention."""

    queries: LowRank
    values: LowRank


class LastBlocks:
    """The last blocks of a vision transformer, from the hidden states that enter them to unit-length features."""

    def __init__(self, tower: VisionTransformer) -> None:
        self._tower = tower
        self._blocks = [block for block in tower.blocks if isinstance(block, Block)][-LAST_BLOCKS:]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return self._tower.ln_post.normalized_shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._tower.projection.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self._tower.projection.dtype

    def __call__(self, hidden: Tensor, changes: Sequence[LoraDelta] | None = None) -> Tensor:
        """Features (n, D) of hidden states (n, tokens, width), differentiable in `changes`, one for each block."""
        for place, block in enumerate(self._blocks):
            kept = 1 if place == len(self._blocks) - 1 else hidden.shape[1]
            # Without changes these are the operations of the tower itself, so features agree to the last bit.
            if changes or kept == 1:
                hidden = _run(block, hidden, kept, changes[place] if changes else None)
            else:
                hidden = block(hidden)
        features = self._tower.pool(hidden)
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)

    def encode(self, hidden: Tensor, changes: Sequence[LoraDelta] | None = None) -> Tensor:
        """The same in parts that fit into memory, without a graph."""
        return map_chunks(lambda part: self(part, changes), hidden, self.device)


def _run(block: nn.Module, hidden: Tensor, kept: int, change: LoraDelta | None = None) -> Tensor:
    """The first `kept` hidden states (n, kept, width) after a block, from all before it (n, tokens, width)."""
    assert isinstance(block, Block)
    hidden = hidden[:, :kept] + _attention(block.attention, block.ln_1(hidden), kept, change)
    streamed: Tensor = hidden + block.mlp(block.ln_2(hidden))
    return streamed


def _attention(attention: Attention, x: Tensor, kept: int, change: LoraDelta | None) -> Tensor:
    """What attention adds to the first `kept` tokens (n, kept, width) of the normalised stream x (n, tokens, width)."""
    n, _, width = x.shape
    first, weight, bias = x[:, :kept], attention.qkv.weight, attention.qkv.bias
    q = linear(first, weight[:width], bias[:width])
    k, v = linear(x, weight[width:], bias[width:]).chunk(2, dim=-1)
    if change:
        q = q + first @ change.queries.down.to(x.dtype) @ change.queries.up.to(x.dtype)
        v = v + x @ change.values.down.to(x.dtype) @ change.values.up.to(x.dtype)
    by_head = attention.heads, width // attention.heads
    q, k, v = (part.view(n, part.shape[1], *by_head).transpose(1, 2) for part in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v)
    joined: Tensor = attention.out(mixed.transpose(1, 2).reshape(n, kept, width))
    return joined


class TextTransformer(nn.Module):
    """CLIP's text tower as a `base.TextTower`: causal, read at the end-of-text token."""

    causal = True
    familiarity: Familiarity | None = None
    """Of the embedded model; CLIP itself was trained with far more text."""

    def __init__(self, config: CLIPConfig, text: TextConfig, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.width = text.width
        self.context_length = text.context_length
        self.tokenizer = tokenizer
        # Not initialised: to draw its weights on the meta device, torch would import its compiler, for two seconds.
        weights = torch.zeros(text.vocab_size, text.width)
        self.token_embedding = nn.Embedding.from_pretrained(weights)  # type: ignore[no-untyped-call]
        self.positional_embedding = nn.Parameter(torch.zeros(text.context_length, text.width))
        self.blocks = make_blocks(text.width, text.layers, text.heads, config.activation, causal=True)
        self.ln_final = nn.LayerNorm(text.width)
        self.projection = nn.Parameter(torch.zeros(text.width, config.embed_dim))

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids (n, context_length), padded with 0. A text that does not fit raises ValueError naming it."""
        return self.tokenizer.tokenize(texts, self.context_length)

    def embed(self, ids: Tensor) -> Tensor:
        """Word embeddings (n, L, width) of `ids` (n, L), without positions, on the tower's device."""
        embeddings: Tensor = self.token_embedding(ids.to(self.token_embedding.weight.device))
        return embeddings

    def encode(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """Unit-length features (n, D) of `embeddings` (n, L, width), differentiable in them.

        L may be anything up to `context_length`, as long as every text's end stands within it: the tower is causal, so
        what follows the end-of-text token (the largest id) changes nothing.
        """
        length = embeddings.shape[1]
        hidden = embeddings + self.positional_embedding[:length]
        for block in self.blocks:
            hidden = block(hidden)
        end = ids.to(hidden.device).argmax(-1)
        last = hidden[torch.arange(len(hidden), device=hidden.device), end]
        features = self.ln_final(last) @ self.projection
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


class CLIP(TwoTowers):
    """The two towers as a `base.Model`."""

    int8_blocks: nn.Module | None
    """The blocks of the image tower in int8, for crops, if that precision was chosen (see `precision.prepare`)."""

    def __init__(
        self,
        config: CLIPConfig,
        *,
        name: str,
        logit_scale: float = 100.0,
        is_random: bool = False,
        tokenizer: CLIPTokenizer | None = None,
    ) -> None:
        super().__init__(
            name=name,
            embed_dim=config.embed_dim,
            image_size=config.vision.image_size,
            mean=config.mean,
            std=config.std,
            logit_scale=logit_scale,
        )
        self.config = config
        self.is_random = is_random
        self.resize_mode, self.interpolation = config.resize_mode, config.interpolation
        self.register_module("int8_blocks", None)
        self.image_tower = (
            VisionTransformer(config, config.vision)
            if isinstance(config.vision, ViTConfig)
            else ModifiedResNet(config.vision, config.embed_dim)
        )
        self.text_tower = TextTransformer(config, config.text, tokenizer or default_tokenizer())
        self.freeze()

    @classmethod
    def from_state(cls, config: CLIPConfig, state: dict[str, Tensor], **settings: Any) -> Self:
        """A model whose parameters are the tensors of `state`, in this library's own key names, without a copy."""
        with torch.device("meta"):
            model = cls(config, **settings)
        model.load_state_dict(state, assign=True)
        return model.freeze()

    @property
    def text(self) -> TextTransformer:
        """The text tower."""
        return self.text_tower

    def image_features(self, pixels: Tensor) -> Tensor:
        """Features (n, D), of any length, of normalised pixels (n, 3, S, S)."""
        features: Tensor = self.image_tower(pixels)
        return features

    @property
    def precision(self) -> str:
        """Of the image tower: fp32, bf16, fp16, int8, or fp64 in tests."""
        return super().precision if self.int8_blocks is None else "int8"

    @property
    def encode_crops(self) -> Callable[[Tensor], Tensor] | None:
        """In int8, `encode_images` for crops: a view that is one of many may err, the image itself may not."""
        return None if self.int8_blocks is None else partial(self.encode_with, self._int8_features)

    def _int8_features(self, pixels: Tensor) -> Tensor:
        assert self.int8_blocks is not None
        assert isinstance(self.image_tower, VisionTransformer)
        features: Tensor = self.int8_blocks(self.image_tower.embed_patches(pixels))
        return features

    def hidden_states(self, pixels: Tensor) -> Tensor:
        """What enters the last blocks of the image tower (n, tokens, width), of pixels as `encode_images` takes them.

        64 views of ViT-B/16 take 38 MB.
        """
        tower = self._vision_transformer()
        self.check(pixels)

        def before_last(part: Tensor) -> Tensor:
            hidden: Tensor = tower.embed_patches(self.normalize(part))
            for block in tower.blocks[:-LAST_BLOCKS]:
                hidden = block(hidden)
            return hidden

        return map_chunks(before_last, pixels, self.device)

    def last_blocks(self) -> LastBlocks:
        """The last blocks of the image tower: `last_blocks().encode(hidden_states(pixels))` are the features."""
        return LastBlocks(self._vision_transformer())

    def _vision_transformer(self) -> VisionTransformer:
        if self.precision == "int8":
            raise ValueError(
                "TTL tunes the image encoder, which is not possible in int8: use fp32 or bf16, or another method"
            )
        if not isinstance(self.image_tower, VisionTransformer):
            raise ValueError(no_last_blocks(self.name))
        return self.image_tower

    def describe(self) -> str:
        """The configuration."""
        return repr(self.config)

    def describe_images(self) -> str:
        """The configuration without that of the text tower."""
        config = self.config
        return repr((config.embed_dim, config.vision, config.activation, config.mean, config.std))


def random_model(config: CLIPConfig, *, name: str, seed: int = 0) -> CLIP:
    """A CLIP of this architecture with weights drawn from `seed`, for benchmarks and tests; its `is_random` is set.

    Shapes and speed are right, answers mean nothing. Everything is drawn on the CPU from one seeded generator, in the
    order of the keys, so equal seeds give equal weights on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in CLIP(config, name=name).state_dict().items()}
    state = {key: _draw(key, shape, config, generator) for key, shape in shapes.items()}
    return CLIP.from_state(config, state, name=name, is_random=True)


def _draw(key: str, shape: torch.Size, config: CLIPConfig, generator: torch.Generator) -> Tensor:
    if key.endswith("bias") or key.endswith("running_mean"):
        return torch.zeros(shape)
    if ".ln_" in key or ".norm." in key:  # the weights of a normalisation, and a batch normalisation's variance
        return torch.ones(shape)
    return torch.randn(shape, generator=generator) * _deviation(key, shape, config)


def _deviation(key: str, shape: torch.Size, config: CLIPConfig) -> float:
    """OpenAI's initialisation: features of different inputs differ, and gradients neither vanish nor explode."""
    tower, _, rest = key.partition(".")
    if tower == "text_tower" and rest == "token_embedding.weight":
        return 0.02
    if tower == "text_tower" and rest == "positional_embedding":
        return 0.01
    if rest.endswith(("attention.out.weight", "mlp.down.weight")):  # what is added to the residual stream
        layers = config.text.layers if tower == "text_tower" else config.vision.layers
        assert isinstance(layers, int)
        return float(shape[0] ** -0.5 * (2 * layers) ** -0.5)
    if rest.endswith("mlp.up.weight"):
        return float((2 * shape[1]) ** -0.5)
    if rest.endswith(("projection", "class_embedding", "positional_embedding")):
        return float((shape[0] if rest.endswith("projection") else shape[-1]) ** -0.5)
    if len(shape) == 4:  # convolutions keep the variance through the ReLU
        return float((2 / math.prod(shape[1:])) ** 0.5)
    return float(shape[-1] ** -0.5)
