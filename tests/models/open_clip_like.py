"""Stand-ins with the attribute names and signatures of open_clip's models, tokenizers and transforms.

open_clip needs torchvision, which does not import with every build of torch; its interface is what the adapter uses.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from usetta.models.tokenizer import default_tokenizer

WIDTH, SPACE, SIDE = 32, 24, 32


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        wide = nn.Linear(width, 4 * width)
        self.mlp = nn.Sequential(OrderedDict(c_fc=wide, gelu=act(), c_proj=nn.Linear(4 * width, width)))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([ResidualAttentionBlock(width, act) for _ in range(2)])

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, attn_mask=attn_mask)
        return x


class TimmModel(nn.Module):
    """An image tower that is not CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(8 * 16, SPACE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class TextTransformer(nn.Module):
    """`pool_type` "argmax" and a causal mask are CLIP's, "last" and none are SigLIP's."""

    def __init__(self, length: int, vocab_size: int, act: type[nn.Module], pool_type: str = "argmax") -> None:
        super().__init__()
        self.context_length, self.vocab_size, self.pool_type = length, vocab_size, pool_type
        self.token_embedding = nn.Embedding(vocab_size, WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(length, WIDTH))
        self.transformer = Transformer(WIDTH, act)
        self.ln_final = nn.LayerNorm(WIDTH)
        if pool_type == "argmax":
            mask = torch.full((length, length), float("-inf")).triu_(1)
            self.text_projection: nn.Module | nn.Parameter = nn.Parameter(torch.randn(WIDTH, SPACE))
        else:
            mask, self.text_projection = None, nn.Linear(WIDTH, SPACE)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        x = self.token_embedding(text) + self.positional_embedding[:length]
        mask = None if self.attn_mask is None else self.attn_mask[:length, :length]
        x = self.ln_final(self.transformer(x, attn_mask=mask))
        if self.pool_type == "last":
            return self.text_projection(x[:, -1])
        return x[torch.arange(len(x)), text.argmax(-1)] @ self.text_projection


class CustomTextCLIP(nn.Module):
    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.visual, self.text = TimmModel(), text
        self.logit_scale = nn.Parameter(torch.tensor(4.0))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        return self.text(text)


class CLIP(nn.Module):
    """The parts of the text tower are attributes of the model."""

    def __init__(self, text: TextTransformer) -> None:
        super().__init__()
        self.visual, self.transformer, self.ln_final = TimmModel(), text.transformer, text.ln_final
        self.token_embedding, self.positional_embedding = text.token_embedding, text.positional_embedding
        self.text_projection = text.text_projection
        self.register_buffer("attn_mask", text.attn_mask, persistent=False)
        self.logit_scale = nn.Parameter(torch.tensor(4.0))

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask))
        return x[torch.arange(len(x)), text.argmax(-1)] @ self.text_projection


class SimpleTokenizer:
    """CLIP's; a text that is too long is cut off."""

    def __init__(self, context_length: int = 77) -> None:
        self.context_length = context_length

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        length, own = context_length or self.context_length, default_tokenizer()
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            tokens = [own.start, *own.encode(text), own.end][:length]
            tokens[-1] = own.end
            row[: len(tokens)] = torch.tensor(tokens)
        return ids


class HFTokenizer:
    """Letters as tokens from 3 on, 2 ends a text, 1 is padding."""

    context_length = 40

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        length = context_length or self.context_length
        ids = torch.ones(len(texts), length, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            tokens = [*(3 + ord(letter) % 60 for letter in text.lower()[: length - 1]), 2]
            row[: len(tokens)] = torch.tensor(tokens)
        return ids


@dataclass
class InterpolationMode:
    value: str


@dataclass
class Resize:
    size: int | tuple[int, int]
    interpolation: InterpolationMode


@dataclass
class ResizeKeepRatio:
    size: tuple[int, int]
    interpolation: InterpolationMode
    longest: float = 1.0


@dataclass
class CenterCrop:
    size: tuple[int, int] = (SIDE, SIDE)


@dataclass
class CenterCropOrPad:
    size: int = SIDE
    fill: int = 0


@dataclass
class RandomResizedCrop:
    size: tuple[int, int] = (SIDE, SIDE)


@dataclass
class ToTensor:
    pass


@dataclass
class Normalize:
    mean: Sequence[float] = (0.5, 0.4, 0.3)
    std: Sequence[float] = (0.2, 0.3, 0.4)


@dataclass
class Compose:
    transforms: list[object] = field(default_factory=list)


def evaluation(resize: object | None = None, *more: object) -> Compose:
    """What open_clip returns as the third of `create_model_and_transforms`."""
    first = resize or Resize(SIDE, InterpolationMode("bicubic"))
    return Compose([first, *(more or (CenterCrop(),)), ToTensor(), Normalize()])
