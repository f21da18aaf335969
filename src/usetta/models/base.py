"""What every model offers to the rest of the library: two towers into one space.

The rest of `usetta` sees a model only through these two protocols, so CLIP written here, the embedded model and
adapters for hub models are interchangeable. Features are float32 (text features of a float64 tower are float64) and of
unit length, so a logit is `logit_scale * image @ text`. Pixels arrive un-normalised: uint8 views stay uint8 until they
reach the model, which owns its mean and standard deviation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # so that names and errors of models can be had without the seconds that importing torch takes
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from usetta.models.clip import LastBlocks


class ModelError(Exception):
    """A model could not be found, downloaded or loaded; the message says what and why."""


class UnknownModelError(ModelError, ValueError):
    """No model has that name."""


@runtime_checkable
class TextTower(Protocol):
    """Turns token embeddings into text features, so that a learned context can stand in for words."""

    width: int
    context_length: int
    causal: bool
    """Whether a position sees only earlier ones. Sharing prefixes and trimming padding are exact only if it does."""

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids (n, context_length), padded. A text that does not fit raises ValueError naming it."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Word embeddings of `ids` (n, L), without positions: (n, L, width)."""
        ...

    def encode(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """Unit-length text features (n, D) of `embeddings` (n, L, width); `ids` (n, L) tell where each text ends."""
        ...


@runtime_checkable
class Model(Protocol):
    """A pair of towers."""

    name: str
    embed_dim: int
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    logit_scale: float
    """The factor between cosine and logit (already exponentiated; about 100 for CLIP)."""

    @property
    def text(self) -> TextTower:
        """The text tower."""
        ...

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit-length features (n, D) of pixels (n, 3, S, S): uint8 in 0..255 or float in 0..1, not normalised."""
        ...

    def hidden_states(self, pixels: Tensor) -> Tensor:
        """What enters the last blocks of the image tower (n, tokens, width); ValueError if it has no such blocks."""
        ...

    def last_blocks(self) -> LastBlocks:
        """Those blocks, from hidden states to features; ValueError if there are none."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of architecture and weights: equal fingerprints give equal features."""
        ...


def encode_whole_images(model: Model, pixels: Tensor) -> Tensor:
    """Features (n, D) of images as they are, not of crops."""
    return (own_way_with_images(model) or model.encode_images)(pixels)


def own_way_with_images(model: Model) -> Callable[[Tensor], Tensor] | None:
    """How a model encodes images as they are, if otherwise than crops: in more precision, since there is but one."""
    return getattr(model, "encode_whole_images", None)


def encode_views(model: Model, pixels: Tensor, *, weak: int = 1) -> Tensor:
    """Features (N, D) of views (N, 3, S, S) of any size, the first `weak` of them weak views."""
    import torch

    fitting = _resized(pixels, model.image_size)
    return torch.cat([encode_whole_images(model, fitting[:weak]), model.encode_images(fitting[weak:])])


def encode_views_together(model: Model, images: Sequence[Tensor], *, weak: int = 1) -> list[Tensor]:
    """The same for several images, whose views fill the batches of a device together."""
    import torch

    fitting = [_resized(pixels, model.image_size) for pixels in images]
    first = encode_whole_images(model, torch.cat([pixels[:weak] for pixels in fitting]))
    strong = model.encode_images(torch.cat([pixels[weak:] for pixels in fitting]))
    rest = torch.split(strong, [len(pixels) - weak for pixels in fitting])
    return [torch.cat(parts) for parts in zip(torch.split(first, weak) if weak else [first] * len(rest), rest)]


def hidden_states(model: Model, pixels: Tensor) -> Tensor:
    return model.hidden_states(pixels)


def last_blocks(model: Model) -> LastBlocks:
    return model.last_blocks()


def _resized(pixels: Tensor, size: int) -> Tensor:
    import torch

    if pixels.shape[-1] == size:
        return pixels
    unit = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    return torch.nn.functional.interpolate(unit, size=(size, size), mode="bicubic", antialias=True).clamp(0, 1)
