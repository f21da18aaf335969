"""CLIP in plain PyTorch: the vision transformer, the text transformer, and the pair of them as a `base.Model`.

Written here rather than taken from a library because the test-time methods reach inside: prompt tuning feeds its own
embeddings into the text tower, a fast path walks `text.blocks` with packed tokens, and TTL re-runs the last image
blocks from stored hidden states, with queries and values changed (`LastBlocks`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention

from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.models.parallel import map_chunks
from usetta.models.resnet import ModifiedResNet
from usetta.models.tokenizer import CLIPTokenizer, default_tokenizer
from usetta.models.towers import TwoTowers
from usetta.models.transformer import Attention, Block, make_blocks

LAST_BLOCKS = 3
"""How many blocks of a vision transformer `LastBlocks` holds: as many as TTL adapts."""


class VisionTransformer(nn.Module):
    """Normalised pixels (n, 3, S, S) to features (n, embed_dim), not of unit length.

    Only the class token is pooled, so the last block computes no other; that is exact, and spares 7 % of ViT-B/16.
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
        first = self.class_embedding.expand(len(pixels), 1, -1)
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
            # Without changes, the very operations of the tower, so that the features are the same to the last bit.
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
    """CLIP's text tower as a `base.TextTower`: causal, read out at the end-of-text token."""

    causal = True

    def __init__(self, config: CLIPConfig, text: TextConfig, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.width = text.width
        self.context_length = text.context_length
        self.tokenizer = tokenizer
        self.token_embedding = nn.Embedding(text.vocab_size, text.width)
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
        """The last blocks of the image tower: `tail().encode(hidden_states(pixels))` are the features."""
        return LastBlocks(self._vision_transformer())

    def _vision_transformer(self) -> VisionTransformer:
        if self.precision == "int8":
            raise ValueError(
                "TTL tunes the image tower, which it cannot do in int8: use fp32 or bf16, or another method"
            )
        if not isinstance(self.image_tower, VisionTransformer):
            raise ValueError(self._no_last_blocks())
        return self.image_tower

    def describe(self) -> str:
        """The configuration."""
        return repr(self.config)
