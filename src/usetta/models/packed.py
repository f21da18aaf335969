"""CLIP's text tower for many texts that begin alike, without the work that padding and repetition cost.

The tower is causal. So the start token and the context have the same keys and values in all texts, nothing after the
end-of-text token matters, and the last block is needed at that token only. What follows the context in each text (its
suffix) is packed: linear layers and normalisations run on one matrix of all tokens, and attention alone goes bucket by
bucket of equal suffix length. On a GPU, where many small operations take longer than few large ones, attention pads all
suffixes to one length instead. This is exact: the same sums as in `TextTransformer.encode`, in another order.

Attention is written out, because that lets a suffix use the shared keys without a copy of them, and because PyTorch
can then run the backward pass for many gradients at once.
"""

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, silu

from usetta.models.clip import QUICK, Block, TextTransformer


class _Bucket(NamedTuple):
    """Neighbouring texts whose suffixes are equally long."""

    texts: int
    length: int

    @property
    def tokens(self) -> int:
        return self.texts * self.length


class _Buckets:
    """Where the tokens of texts are in a packed matrix: the shared ones, then suffixes bucket by bucket."""

    def __init__(self, shared: int, lengths: Sequence[int]) -> None:
        self.shared = shared
        self.buckets = [_Bucket(len(list(same)), length) for length, same in groupby(lengths)]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The shared tokens and those of each bucket, out of (B, T, W)."""
        return torch.split(x, [self.shared, *(bucket.tokens for bucket in self.buckets)], 1)

    def join(self, shared: Tensor, suffixes: Sequence[Tensor]) -> Tensor:
        """The reverse of `split`."""
        return torch.cat([shared, *suffixes], 1)

    def ends(self, x: Tensor) -> Tensor:
        """The last token of each text (B, texts, W)."""
        _, *suffixes = self.split(x)
        return torch.cat([s[:, b.length - 1 :: b.length] for s, b in zip(suffixes, self.buckets, strict=True)], 1)

    def after_end(self, bucket: _Bucket) -> Tensor | None:
        """Places (texts, 1, length) of suffixes behind their last token; None if there are none."""
        return None


class _PaddedSuffixes(_Buckets):
    """The same, with all suffixes in one bucket. What is behind the end of one is a copy of its last token.

    Copies need no mask: a causal tower shows them to each other only, so they get no gradient either.
    """

    def __init__(self, shared: int, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(shared, lengths)
        longest = max(lengths)
        self.buckets = [_Bucket(len(lengths), longest)]
        length, place = torch.tensor(lengths)[:, None], torch.arange(longest)
        first = length.cumsum(0) - length
        rows = first + place.clamp(max=length - 1)
        packed = (place < length).flatten().nonzero()[:, 0]
        moved = (rows.flatten(), packed, shared + (first + length - 1)[:, 0], (place >= length)[:, None])
        self._rows, self._packed, self._ends, self._after_end = (t.to(device, non_blocking=True) for t in moved)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, : self.shared], x[:, self.shared :].index_select(1, self._rows)

    def join(self, shared: Tensor, suffixes: Sequence[Tensor]) -> Tensor:
        return torch.cat([shared, suffixes[0].index_select(1, self._packed)], 1)

    def ends(self, x: Tensor) -> Tensor:
        return x.index_select(1, self._ends)

    def after_end(self, bucket: _Bucket) -> Tensor | None:
        return self._after_end


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
        self._layouts: dict[tuple[int, int], _Buckets] = {}

    def pick(self, rows: list[int]) -> Self:
        """The texts of these rows, which must rise."""
        picked = copy(self)
        picked.lengths = [self.lengths[row] for row in rows]
        picked._suffixes = tuple(self._suffixes[row] for row in rows)  # noqa: SLF001 - a copy of itself
        picked._layouts = {}  # noqa: SLF001
        return picked

    def encode(self, contexts: Tensor, first: int, last: int) -> Tensor:
        """Unit-length features (B, last - first, D) of those texts with each of `contexts` (B, n, W)."""
        tower, layout = self._tower, self._layout(first, last)
        start = self._start.expand(len(contexts), -1, -1)
        shared = torch.cat([start, contexts.to(start.dtype)], 1) + tower.positional_embedding[: self.shared]
        suffixes = torch.cat(self._suffixes[first:last]).expand(len(contexts), -1, -1)
        hidden = torch.cat([shared, suffixes], 1)
        *blocks, last_block = tower.blocks
        for block in blocks:
            assert isinstance(block, Block)
            hidden = hidden + _attention(block, block.ln_1(hidden), layout)
            hidden = hidden + _mlp(block, block.ln_2(hidden))
        assert isinstance(last_block, Block)
        end = layout.ends(hidden) + _last_attention(last_block, last_block.ln_1(hidden), layout)
        end = end + _mlp(last_block, last_block.ln_2(end))
        features = tower.ln_final(end) @ tower.projection
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)

    def _layout(self, first: int, last: int) -> _Buckets:
        device = self._start.device
        if device.type == "cpu":
            return _Buckets(self.shared, self.lengths[first:last])
        if (first, last) not in self._layouts:
            self._layouts[first, last] = _PaddedSuffixes(self.shared, self.lengths[first:last], device)
        return self._layouts[first, last]


class _QuickGelu(torch.autograd.Function):
    """QuickGELU with a backward pass in one operation: in that of SiLU(1.702 x) / 1.702 the two factors cancel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scaled = QUICK * x
        ctx.save_for_backward(scaled)
        return silu(scaled).div_(QUICK)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.silu_backward(grad, ctx.saved_tensors[0])
        return result


def _mlp(block: Block, x: Tensor) -> Tensor:
    """What the MLP adds at every token (B, T, W)."""
    if not (block.mlp.is_quick and torch.is_grad_enabled() and x.requires_grad):
        added: Tensor = block.mlp(x)
        return added
    middle: Tensor = _QuickGelu.apply(block.mlp.up(x))  # type: ignore[no-untyped-call]
    projected: Tensor = block.mlp.down(middle)
    return projected


def _attention(block: Block, x: Tensor, layout: _Buckets) -> Tensor:
    """What attention adds at every token (B, T, W)."""
    heads = block.attention.heads
    prefix, *suffixes = layout.split(block.attention.qkv(x))
    q, k, v = _by_head(prefix, _Bucket(1, layout.shared), 3, heads)
    nothing = k[:, :, 0, :0]
    shared = _attend(q, k, v, nothing, nothing, _later(q))
    shared_k, shared_v = k[:, :, 0], v[:, :, 0]
    mixed = []
    for part, bucket in zip(suffixes, layout.buckets, strict=True):
        q, k, v = _by_head(part, bucket, 3, heads)
        mixed.append(_attend(q, k, v, shared_k, shared_v, _later(q)))
    joined: Tensor = block.attention.out(layout.join(shared, mixed))
    return joined


def _last_attention(block: Block, x: Tensor, layout: _Buckets) -> Tensor:
    """What attention adds at the end-of-text tokens alone (B, texts, W)."""
    heads, width = block.attention.heads, x.shape[-1]
    weight, bias = block.attention.qkv.weight, block.attention.qkv.bias
    queries = linear(layout.ends(x), weight[:width], bias[:width])
    by_bucket = torch.split(queries, [bucket.texts for bucket in layout.buckets], 1)
    prefix, *suffixes = layout.split(linear(x, weight[width:], bias[width:]))
    shared_k, shared_v = _by_head(prefix, _Bucket(1, layout.shared), 2, heads)[:, :, :, 0]
    mixed = []
    for query, part, bucket in zip(by_bucket, suffixes, layout.buckets, strict=True):
        (q,) = _by_head(query, _Bucket(bucket.texts, 1), 1, heads)
        k, v = _by_head(part, bucket, 2, heads)
        mixed.append(_attend(q, k, v, shared_k, shared_v, layout.after_end(bucket)))
    joined: Tensor = block.attention.out(torch.cat(mixed, 1))
    return joined


def _later(q: Tensor) -> Tensor:
    """Places (length, length) that come after a query of (..., length, d)."""
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, unseen: Tensor | None) -> Tensor:
    """Attention (B, texts * queries, W) to the shared tokens (B, heads, n, d) and to a text's own but for the `unseen`.

    q: (B, heads, texts, queries, d); k and v: (B, heads, texts, length, d).
    """
    to_shared = (q.flatten(2, 3) @ shared_k.mT).view(*q.shape[:-1], shared_k.shape[2])
    to_own = q @ k.mT
    if unseen is not None:
        to_own = to_own.masked_fill(unseen, -torch.inf)
    weights = (torch.cat([to_shared, to_own], -1) * q.shape[-1] ** -0.5).softmax(-1)
    on_shared, on_own = torch.split(weights, [shared_k.shape[2], k.shape[3]], -1)
    mixed = (on_shared.flatten(2, 3) @ shared_v) + (on_own @ v).flatten(2, 3)
    return mixed.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, bucket: _Bucket, kinds: int, heads: int) -> Tensor:
    """(B, tokens of the bucket, kinds * W) as (kinds, B, heads, texts, length, d).

    A copy, so that all products read from it as it is and the graph keeps this one instead of several.
    """
    return x.view(len(x), bucket.texts, bucket.length, kinds, heads, -1).permute(3, 0, 4, 1, 2, 5).contiguous()
