"""CLIP's text tower for many texts that begin alike, without the work that padding and repetition cost.

The tower is causal. So the start token and the context have the same keys and values in all texts, nothing after the
end-of-text token matters, and the last block is needed at that token only. What follows the context in each text (its
suffix) is packed: linear layers and normalisations run on one matrix of all tokens, and attention alone goes bucket by
bucket of equal suffix length. This is exact: the same sums as in `TextTransformer.encode`, in another order.

Attention is written out, because that lets a suffix use the shared keys without a copy of them, and because PyTorch
can then run the backward pass for many gradients at once.
"""

from copy import copy
from itertools import groupby
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from usetta.models.clip import Block, TextTransformer


class _Bucket(NamedTuple):
    """Neighbouring texts whose suffixes are equally long."""

    texts: int
    length: int

    @property
    def tokens(self) -> int:
        return self.texts * self.length


class PackedTexts:
    """Texts of a causal tower that all begin with the start token and a context, in the order of their lengths.

    `ids` (U, L) have a context of `context_tokens` after the start token; shorter texts must come first.
    """

    def __init__(self, tower: TextTransformer, ids: Tensor, context_tokens: int) -> None:
        self._tower = tower
        self.shared = 1 + context_tokens
        """The start token and the context, computed once per context."""
        ends = ids.argmax(-1) + 1
        self.lengths: list[int] = (ends - self.shared).tolist()
        """Tokens of each text after the shared ones, the end-of-text token included."""
        places = torch.arange(ids.shape[1])
        chosen = (places >= self.shared) & (places < ends[:, None])
        with torch.inference_mode(False), torch.no_grad():
            self._start = tower.embed(ids[:1, :1])[0]
            positions = tower.positional_embedding[places.expand_as(ids)[chosen]]
            self._suffixes = torch.split(tower.embed(ids[chosen]) + positions, self.lengths)

    def pick(self, rows: list[int]) -> Self:
        """The texts of these rows, which must rise."""
        picked = copy(self)
        picked.lengths = [self.lengths[row] for row in rows]
        picked._suffixes = tuple(self._suffixes[row] for row in rows)  # noqa: SLF001 - a copy of itself
        return picked

    def encode(self, contexts: Tensor, first: int, last: int) -> Tensor:
        """Unit-length features (B, last - first, D) of those texts with each of `contexts` (B, n, W)."""
        tower = self._tower
        buckets = [_Bucket(len(list(same)), length) for length, same in groupby(self.lengths[first:last])]
        start = self._start.expand(len(contexts), -1, -1)
        shared = torch.cat([start, contexts.to(start.dtype)], 1) + tower.positional_embedding[: self.shared]
        suffixes = torch.cat(self._suffixes[first:last]).expand(len(contexts), -1, -1)
        hidden = torch.cat([shared, suffixes], 1)
        *blocks, last_block = tower.blocks
        for block in blocks:
            assert isinstance(block, Block)
            hidden = hidden + _attention(block, block.ln_1(hidden), self.shared, buckets)
            hidden = hidden + block.mlp(block.ln_2(hidden))
        assert isinstance(last_block, Block)
        end = _ends(hidden, self.shared, buckets) + _last_attention(
            last_block, last_block.ln_1(hidden), self.shared, buckets
        )
        end = end + last_block.mlp(last_block.ln_2(end))
        features = tower.ln_final(end) @ tower.projection
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


def _attention(block: Block, x: Tensor, shared: int, buckets: list[_Bucket]) -> Tensor:
    """What attention adds at every token (B, T, W): first the shared ones, then bucket by bucket."""
    heads = block.attention.heads
    prefix, *suffixes = _split(block.attention.qkv(x), shared, buckets)
    q, k, v = _by_head(prefix, _Bucket(1, shared), 3, heads)
    nothing = k[:, :, 0, :0]
    mixed = [_attend(q, k, v, nothing, nothing)]
    shared_k, shared_v = k[:, :, 0], v[:, :, 0]
    for part, bucket in zip(suffixes, buckets, strict=True):
        q, k, v = _by_head(part, bucket, 3, heads)
        mixed.append(_attend(q, k, v, shared_k, shared_v))
    joined: Tensor = block.attention.out(torch.cat(mixed, 1))
    return joined


def _last_attention(block: Block, x: Tensor, shared: int, buckets: list[_Bucket]) -> Tensor:
    """What attention adds at the end-of-text tokens alone (B, texts, W)."""
    heads, width = block.attention.heads, x.shape[-1]
    weight, bias = block.attention.qkv.weight, block.attention.qkv.bias
    queries = linear(_ends(x, shared, buckets), weight[:width], bias[:width])
    by_bucket = torch.split(queries, [bucket.texts for bucket in buckets], 1)
    prefix, *suffixes = _split(linear(x, weight[width:], bias[width:]), shared, buckets)
    shared_k, shared_v = _by_head(prefix, _Bucket(1, shared), 2, heads)[:, :, :, 0]
    mixed = []
    for query, part, bucket in zip(by_bucket, suffixes, buckets, strict=True):
        (q,) = _by_head(query, _Bucket(bucket.texts, 1), 1, heads)
        k, v = _by_head(part, bucket, 2, heads)
        mixed.append(_attend(q, k, v, shared_k, shared_v))
    joined: Tensor = block.attention.out(torch.cat(mixed, 1))
    return joined


def _attend(q: Tensor, k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor) -> Tensor:
    """Causal attention (B, texts * queries, W) to the shared tokens (B, heads, n, d) and to a text's own.

    q: (B, heads, texts, queries, d), at the last positions of k and v: (B, heads, texts, length, d).
    """
    queries, length = q.shape[3], k.shape[3]
    to_shared = (q.flatten(2, 3) @ shared_k.mT).view(*q.shape[:-1], shared_k.shape[2])
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)[-queries:]
    to_own = (q @ k.mT).masked_fill(later, -torch.inf)
    weights = (torch.cat([to_shared, to_own], -1) * q.shape[-1] ** -0.5).softmax(-1)
    on_shared, on_own = torch.split(weights, [shared_k.shape[2], length], -1)
    mixed = (on_shared.flatten(2, 3) @ shared_v) + (on_own @ v).flatten(2, 3)
    return mixed.transpose(1, 2).flatten(2)


def _split(x: Tensor, shared: int, buckets: list[_Bucket]) -> tuple[Tensor, ...]:
    """The shared tokens and those of each bucket, out of (B, T, W)."""
    return torch.split(x, [shared, *(bucket.tokens for bucket in buckets)], 1)


def _by_head(x: Tensor, bucket: _Bucket, kinds: int, heads: int) -> Tensor:
    """(B, tokens of the bucket, kinds * W) as (kinds, B, heads, texts, length, d).

    A copy, so that all products read from it as it is and the graph keeps this one instead of several.
    """
    return x.view(len(x), bucket.texts, bucket.length, kinds, heads, -1).permute(3, 0, 4, 1, 2, 5).contiguous()


def _ends(x: Tensor, shared: int, buckets: list[_Bucket]) -> Tensor:
    """The last token of each text (B, texts, W)."""
    _, *suffixes = _split(x, shared, buckets)
    return torch.cat([s[:, b.length - 1 :: b.length] for s, b in zip(suffixes, buckets, strict=True)], 1)
