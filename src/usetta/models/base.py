"""What the rest of the library knows of a model: two towers into one space.

CLIP written here, the embedded model, adapters for hub models and models of other packages are interchangeable because
they are used through these protocols only. Features are float32 (text features of a float64 tower are float64) and of
unit length, so a logit is `logit_scale * image @ text`. Pixels arrive un-normalised: uint8 views stay uint8 until they
reach the model, which owns its mean and standard deviation.

`encode_views` decides how the views of an image reach the tower. Nothing outside `models/` needs to know a precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # names and errors of models are needed where nobody should wait for torch to be imported
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from usetta.models.clip import LastBlocks
    from usetta.views.recipe import Interpolation, ResizeMode, ViewRecipe


class ModelError(Exception):
    """A model could not be found, downloaded or loaded; the message says what and why."""


class UnknownModelError(ModelError, ValueError):
    """No model has that name."""


@runtime_checkable
class TextTower(Protocol):
    """Turns token embeddings into text features, so that a learned context can take the place of words.

    A tower may also have a `familiarity`, see there.
    """

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
        """Unit-length text features (n, D) of `embeddings` (n, L, width); `ids` (n, L) show where each text ends."""
        ...


class Familiarity(Protocol):
    """What a text tower may offer as `familiarity`, if it knows few enough names that others deserve a warning."""

    def unfamiliar(self, names: Sequence[str], features: Tensor) -> list[str]:
        """Those class names that the tower may not know, given their text features (C, D)."""
        ...


@runtime_checkable
class Model(Protocol):
    """A pair of towers: all that every method but TTL needs.

    A model may also offer `encode_crops(pixels)`, a cheaper `encode_images` for strong views (see `encode_views`),
    `image_fingerprint`, a hash of the image tower alone, which keeps cached features when only the text tower changes,
    `resize_mode` and `interpolation`, if its weak view is not CLIP's (see `view_recipe`), and be a `HasLastBlocks`,
    which TTL needs.
    """

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

    @property
    def fingerprint(self) -> str:
        """A hash of architecture and weights: equal fingerprints give equal features."""
        ...


@runtime_checkable
class HasLastBlocks(Protocol):
    """A model whose image tower ends in attention blocks that can be run again with changed weights."""

    def hidden_states(self, pixels: Tensor) -> Tensor:
        """What enters the last blocks (n, tokens, width), of pixels as `encode_images` takes them."""
        ...

    def last_blocks(self) -> LastBlocks:
        """Those blocks, from hidden states to features. ValueError if this tower or precision has none."""
        ...


def require_last_blocks(model: Model) -> HasLastBlocks:
    """`model` again, once it is known to have last blocks; otherwise a ValueError that says what to use instead."""
    # Not isinstance: a wrapper that passes attributes on dynamically is no instance of a protocol.
    last_blocks = getattr(model, "last_blocks", None)
    if last_blocks is None or not hasattr(model, "hidden_states"):
        raise ValueError(no_last_blocks(model.name))
    last_blocks()  # a residual network and int8 have the method, and say here why they have no blocks
    return model  # type: ignore[return-value]


def no_last_blocks(name: str) -> str:
    """Why TTL cannot be used with the model of that name."""
    return (
        f"the image tower of {name} has no attention blocks that can be run again with changes, which TTL needs: "
        "use a CLIP vision transformer such as ViT-B-16, or another method"
    )


def view_recipe(model: Model, views: int, *, augmix: bool = False, seed: int = 0) -> ViewRecipe:
    """The views of an image for `model`: of its size, and the weak one as it was trained with whole images."""
    from usetta.views.recipe import ViewRecipe

    resize_mode: ResizeMode = getattr(model, "resize_mode", "shortest")
    interpolation: Interpolation = getattr(model, "interpolation", "bicubic")
    return ViewRecipe(views, model.image_size, augmix, seed, resize_mode=resize_mode, interpolation=interpolation)


def encode_views(model: Model, pixels: Tensor, *, weak: int = 1) -> Tensor:
    """Features (N, D) of the views of one image (N, 3, S, S), of any size S, of which the first `weak` are weak views.

    Weak views go through the tower by themselves, so their features are the same to the last bit whatever strong views
    there are. Strong views go through `encode_crops` if the model has it: an error in one of many is averaged away.
    """
    import torch

    fitting = _resized(pixels, model.image_size)
    parts = [(model.encode_images, fitting[:weak]), (_crop_encoder(model), fitting[weak:])]
    # A tower of somebody else need not cope with an empty batch.
    return torch.cat([encode(part) for encode, part in parts if len(part)])


def encode_views_together(model: Model, pixels_of_images: Sequence[Tensor], *, weak: int = 1) -> list[Tensor]:
    """Features (N, D) of the views of several images, of each of which the first `weak` are weak views.

    All strong views make one batch, which a GPU likes, and all weak views another, so that a method that uses nothing
    else gets the same features whatever the number of strong views.
    """
    import torch

    fitting = [_resized(pixels, model.image_size) for pixels in pixels_of_images]
    by_kind = [pixels[:weak] for pixels in fitting] + [pixels[weak:] for pixels in fitting]
    features = encode_views(model, torch.cat(by_kind), weak=weak * len(fitting))
    parts = torch.split(features, [len(pixels) for pixels in by_kind])
    return [torch.cat(own) for own in zip(parts[: len(fitting)], parts[len(fitting) :], strict=True)]


def _crop_encoder(model: Model) -> Callable[[Tensor], Tensor]:
    """How strong views are encoded."""
    return getattr(model, "encode_crops", None) or model.encode_images


def _resized(pixels: Tensor, size: int) -> Tensor:
    """Pixels (n, 3, size, size) of views: as they are if that is their size, else as float in 0..1."""
    import torch
    from torch.nn.functional import interpolate

    if pixels.shape[-1] == size:
        return pixels
    unit = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    return interpolate(unit, size=(size, size), mode="bicubic", antialias=True).clamp(0, 1)
