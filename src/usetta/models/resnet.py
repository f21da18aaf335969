"""CLIP's residual network (Radford et al. 2021, section 2.4): RN50 and RN101.

It differs from the common ResNet in three places: a stem of three convolutions and an average pool, average pooling in
front of every strided convolution, and a final pooling by attention whose query is the mean of the feature map.
Batch normalisation always uses its stored statistics, so it is written as the affine map that it then is.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, batch_norm, relu, scaled_dot_product_attention

from usetta.models.config import ResNetConfig

_EXPANSION = 4


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with stored statistics only."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)


class ConvNorm(nn.Module):
    """A convolution without bias, then normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = FrozenBatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.conv(x))
        return normed


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; a stride is an average pool, in both branches."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * _EXPANSION
        self.stride = stride
        self.reduce = ConvNorm(inputs, planes, 1)
        self.spatial = ConvNorm(planes, planes, 3)
        self.expand = ConvNorm(planes, outputs, 1)
        self.shortcut = ConvNorm(inputs, outputs, 1) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        branch = relu(self.spatial(relu(self.reduce(x))))
        branch = self.expand(self._pool(branch))
        if self.shortcut is not None:
            x = self.shortcut(self._pool(x))
        return relu(branch + x)

    def _pool(self, x: Tensor) -> Tensor:
        return avg_pool2d(x, self.stride) if self.stride > 1 else x


class AttentionPool(nn.Module):
    """One attention query, the mean of the feature map, over the map itself: (n, C, h, w) to (n, D)."""

    def __init__(self, tokens: int, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.zeros(tokens, width))
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        cells = x.flatten(2).transpose(1, 2)
        cells = torch.cat([cells.mean(1, keepdim=True), cells], 1) + self.positional_embedding
        q = self._split(self.query(cells[:, :1]))
        k = self._split(self.key(cells))
        v = self._split(self.value(cells))
        pooled: Tensor = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))
        return pooled

    def _split(self, x: Tensor) -> Tensor:
        """(n, L, width) to (n, heads, L, width per head)."""
        n, length, width = x.shape
        return x.view(n, length, self.heads, width // self.heads).transpose(1, 2)


class ModifiedResNet(nn.Module):
    """Normalised pixels (n, 3, S, S) to features (n, embed_dim), not of unit length."""

    def __init__(self, config: ResNetConfig, embed_dim: int) -> None:
        super().__init__()
        width = config.width
        self.stem = nn.ModuleList(
            [ConvNorm(3, width // 2, 3, stride=2), ConvNorm(width // 2, width // 2, 3), ConvNorm(width // 2, width, 3)]
        )
        self.stages = nn.ModuleList()
        inputs = width
        for stage, depth in enumerate(config.layers):
            planes = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (depth - 1)
            blocks = []
            for stride in strides:
                blocks.append(Bottleneck(inputs, planes, stride))
                inputs = planes * _EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.pool = AttentionPool(config.tokens, config.pool_width, config.heads, embed_dim)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels
        for layer in self.stem:
            x = relu(layer(x))
        x = avg_pool2d(x, 2)
        for stage in self.stages:
            x = stage(x)
        pooled: Tensor = self.pool(x)
        return pooled
