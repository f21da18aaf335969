"""Models that somebody has loaded already with open_clip or transformers, as a `base.Model`.

A transformers CLIP is copied into CLIP written here, tensor by tensor. An open_clip model keeps its own image tower,
whatever it is made of (timm's towers too). Its text tower becomes CLIP's own where the two agree on a few texts, which
makes tuning fast; any other runs its own code, with the learned context put in place of the token embeddings.

Neither library is imported here but by `from_open_clip`: objects are known by their attributes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from usetta.models.adapters import Siglip, require_all_positions
from usetta.models.base import Model, ModelError
from usetta.models.checkpoints import clip_from_state
from usetta.models.clip import TextTransformer
from usetta.models.config import OPENAI_MEAN, OPENAI_STD, CLIPConfig, TextConfig, ViTConfig
from usetta.models.layouts import own_shape, to_own
from usetta.models.sidecar import Preprocessing, processor_settings, sidecar_of_transformers
from usetta.models.tokenizer import CLIPTokenizer, default_tokenizer
from usetta.models.towers import TwoTowers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SAMPLES = ("", "a photo of a cat.", "Two dogs, 3 birds & a café!")
"""Texts by which a tokenizer and a text tower are recognised as CLIP's."""

_HOOK_LOCK = RLock()
"""A hook would reach into the computation of another thread."""

_NO_OP = {"MaybeConvertMode", "MaybeToTensor", "ToTensor", "_convert_to_rgb", "function"}
"""Steps of a preprocessing that change no pixel of an RGB image."""


def as_model(given: object) -> Model:
    """A model as it is, or made of `(open_clip_model, preprocess, tokenizer)` or of a transformers model.

    A transformers CLIP may come alone or as `(model, processor)`; SigLIP needs its processor, for the tokenizer. The
    weights of the object are shared or copied, and it is put into evaluation mode, without gradients.
    """
    if hasattr(given, "encode_images"):
        return given  # type: ignore[return-value]
    model, *rest = given if isinstance(given, tuple | list) and given else (given,)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in ("clip", "siglip") and hasattr(model, "text_model") and len(rest) <= 1:
        return _from_transformers(model, *rest)
    if all(hasattr(model, name) for name in ("visual", "encode_image", "encode_text", "logit_scale")):
        if len(rest) != 2:
            raise ModelError("an open_clip model is given as (model, preprocess, tokenizer)")
        return _from_open_clip(model, *rest, name=f"open_clip {type(model).__name__}")
    raise ModelError(
        f"a model must be a name, a path, an open_clip model as (model, preprocess, tokenizer), a CLIP or SigLIP of "
        f"transformers, or have the attributes of usetta.models.Model; got {_described(given)}"
    )


def from_open_clip(
    name: str,
    pretrained: str | None = None,
    *,
    device: str | torch.device | None = "auto",
    precision: str = "auto",
    cache_dir: Path | None = None,
) -> OpenClip:
    """The model that open_clip calls `name`, with the weights that it calls `pretrained` (extra `usetta[open-clip]`).

    name: such as "ViT-B-16-SigLIP2", or "hf-hub:org/repo", whose weights need no tag.
    device, precision: as for `load_model`.
    """
    from usetta.models.precision import check_precision, prepare, resolve_device

    check_precision(precision)
    where = resolve_device(device)
    try:
        import open_clip  # type: ignore[import-not-found]
    except Exception as error:  # noqa: BLE001 - a torchvision that was built for another torch raises almost anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name} needs open_clip: pip install 'usetta[open-clip]' ({reason})") from None
    options = {"cache_dir": str(cache_dir)} if cache_dir else {}
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained, **options)
        tokenizer = open_clip.get_tokenizer(name)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"open_clip cannot load {name} with the weights {pretrained} ({reason})") from None
    if pretrained is None and ":" not in name:
        raise ModelError(f"{name} would have random weights: choose some of {_tags(open_clip, name)}")
    adapted = _from_open_clip(
        model.to(where), preprocess, tokenizer, name=f"{name}/{pretrained}" if pretrained else name
    )
    prepare(adapted, precision)
    return adapted


def _tags(open_clip: Any, name: str) -> str:
    return ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none that open_clip knows"


def _described(given: object) -> str:
    if isinstance(given, tuple | list):
        return f"({', '.join(type(part).__name__ for part in given)})"
    return f"a {type(given).__name__}"


# --- transformers ----------------------------------------------------------------------------------------------------


def _from_transformers(model: Any, processor: Any = None) -> Model:
    name = Path(getattr(model.config, "_name_or_path", "") or "").name or type(model).__name__
    tokenizer, images = getattr(processor, "tokenizer", None), getattr(processor, "image_processor", None)
    if processor is not None and (tokenizer is None or images is None):
        raise ModelError(f"{name} is given as (model, processor), with a processor of images and texts")
    settings = images.to_dict() if images else {}
    if model.config.model_type == "siglip":
        if processor is None:
            raise ModelError(f"{name} needs its tokenizer: give it as (model, processor)")
        preprocessing = processor_settings(f"the processor of {name}", settings, model.config.vision_config.image_size)
        return Siglip(model, tokenizer, name=name, preprocessing=preprocessing)
    beside = sidecar_of_transformers(Path(name), model.config.to_dict(), settings)
    own = default_tokenizer()
    if tokenizer is not None:
        try:
            content = json.loads(tokenizer.backend_tokenizer.to_str())
        except AttributeError:
            raise ModelError(f"the tokenizer of {name} is not one of Hugging Face tokenizers") from None
        own = CLIPTokenizer.from_content(content, f"the tokenizer of {name}")
    return clip_from_state(model.state_dict(), beside, own, name=name).to(model.device)


# --- open_clip -------------------------------------------------------------------------------------------------------


class OpenClip(TwoTowers):
    """A model of open_clip: its own image tower, and its text tower or an equal one."""

    def __init__(
        self, model: Any, text: TextTransformer | OwnText, preprocessing: Preprocessing, size: int, name: str
    ) -> None:
        super().__init__(
            name=name,
            embed_dim=0,
            image_size=size,
            mean=preprocessing["mean"],
            std=preprocessing["std"],
            logit_scale=math.exp(model.logit_scale.item()),
        )
        self.resize_mode, self.interpolation = preprocessing["resize_mode"], preprocessing["interpolation"]
        self._settings = _settings_of(model.visual), _settings_of(model)
        self.image_tower = model.visual
        self.text_tower = text
        self.freeze()
        self.embed_dim = self.image_features(torch.zeros(1, 3, size, size, device=self.device, dtype=self.dtype)).shape[
            1
        ]

    @property
    def text(self) -> TextTransformer | OwnText:
        """The text tower."""
        return self.text_tower

    def image_features(self, pixels: Tensor) -> Tensor:
        """Features (n, D), of any length, of normalised pixels (n, 3, S, S)."""
        return _first(self.image_tower(pixels))

    def describe(self) -> str:
        """The settings of all modules, and the pixel statistics."""
        return f"{self._settings[1]} {self.mean} {self.std}"

    def describe_images(self) -> str:
        """The same of the image tower."""
        return f"{self._settings[0]} {self.mean} {self.std}"


class OwnText(nn.Module):
    """A text tower of open_clip as a `base.TextTower`: its own code runs, on embeddings instead of tokens.

    It is not known whether it is causal, so nothing is trimmed or shared.
    """

    causal = False

    def __init__(self, model: Any, tokenizer: Callable[..., Tensor]) -> None:
        super().__init__()
        custom = hasattr(model, "text")  # otherwise the parts of the text tower are attributes of the model
        self.tower = model.text if custom else model
        # In a tuple, so that the same modules are not registered again.
        self._parts = _token_embedding(self.tower), model.text if custom else model.encode_text
        self._tokenizer = tokenizer
        self.width: int = self._parts[0].weight.shape[1]
        self.context_length: int = tokenizer([""]).shape[1]

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids (n, context_length), padded as in training. A text that does not fit raises ValueError."""
        length = self.context_length
        if not texts:
            return torch.zeros(0, length, dtype=torch.long)
        ids = self._tokenizer(list(texts))
        # open_clip cuts texts off silently. One that fits gives the same tokens where there is more room, then padding.
        roomy = self._tokenizer(list(texts), context_length=2 * length)
        fits = (roomy[:, :length] == ids).all(1) & (roomy[:, length:] == roomy[:, -1:]).all(1)
        if not fits.all():
            text = texts[int(fits.int().argmin())]
            raise ValueError(f"the text has more tokens than the {length} that the model takes: {text!r}")
        return ids

    def embed(self, ids: Tensor) -> Tensor:
        """Word embeddings (n, L, width) of `ids` (n, L), without positions, on the tower's device."""
        table, _ = self._parts
        embeddings: Tensor = table(ids.to(table.weight.device))
        return embeddings

    def encode(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """Unit-length features (n, D) of `embeddings` (n, context_length, width), differentiable in them."""
        require_all_positions(embeddings, self.context_length)
        table, forward = self._parts
        with _HOOK_LOCK:
            hook = table.register_forward_hook(lambda _module, _ids, _words: embeddings)
            try:
                features = _first(forward(ids.to(embeddings.device)))
            finally:
                hook.remove()
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


def _from_open_clip(model: Any, preprocess: Any, tokenizer: Any, *, name: str) -> OpenClip:
    preprocessing, size = _read_transforms(preprocess)
    model.eval()
    own = OwnText(model, tokenizer)
    text = _clip_text(own)
    return OpenClip(model, own if text is None else text, preprocessing, size, name)


def _first(features: Any) -> Tensor:
    """Features alone: some towers return their tokens too."""
    tensor: Tensor = features[0] if isinstance(features, tuple) else features
    return tensor


def _token_embedding(tower: Any) -> nn.Embedding:
    embedding = getattr(tower, "token_embedding", None)
    if embedding is None and hasattr(getattr(tower, "transformer", None), "get_input_embeddings"):
        embedding = tower.transformer.get_input_embeddings()  # a text tower of transformers inside open_clip
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(f"the text tower {type(tower).__name__} has no token embedding that a context could replace")
    return embedding


def _settings_of(module: nn.Module) -> str:
    """Everything about a module but its tensors that may change what it computes, such as numbers of heads."""
    plain = (bool, int, float, str, type(None))
    return repr(
        [
            (
                name,
                type(part).__name__,
                sorted((k, v) for k, v in vars(part).items() if isinstance(v, plain) and k[0] != "_"),
            )
            for name, part in module.named_modules()
        ]
    )


def _clip_text(own: OwnText) -> TextTransformer | None:
    """CLIP's text tower with the weights of `own`, if that computes the same; else None."""
    tower, tokenizer = own.tower, default_tokenizer()
    state = {key: tensor for key, tensor in tower.state_dict().items() if not key.startswith("visual.")}
    try:
        heads = tower.transformer.resblocks[0].attn.num_heads
        is_quick = type(tower.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
        vocabulary, width = tower.token_embedding.weight.shape
        config = TextConfig(width, len(tower.transformer.resblocks), heads, own.context_length, vocabulary)
        embed_dim = tower.text_projection.shape[1]
    except (AttributeError, IndexError, TypeError):
        return None
    whole = CLIPConfig(embed_dim, ViTConfig(1, 1, 1, 1, 1), config, "quick_gelu" if is_quick else "gelu")
    with torch.device("meta"):
        text = TextTransformer(whole, config, tokenizer)
    shapes = {f"text_tower.{key}": tuple(tensor.shape) for key, tensor in text.state_dict().items()}
    if any(own_shape(state, key, "openai") != shape for key, shape in shapes.items()):
        return None
    device, dtype = own.embed(torch.zeros(1, 1, dtype=torch.long)).device, tower.token_embedding.weight.dtype
    weights = to_own(state, shapes, "openai")
    text.load_state_dict({key.removeprefix("text_tower."): weights[key].to(device) for key in shapes}, assign=True)
    text.requires_grad_(False)
    try:
        ids = own.tokenize(_SAMPLES)
        same_tokens = torch.equal(ids, text.tokenize(_SAMPLES))
    except ValueError:  # too long for this tower, so it is not CLIP's
        return None
    with torch.no_grad():
        if not same_tokens or ids.max() >= vocabulary:
            return None
        difference = (text.encode(text.embed(ids), ids) - own.encode(own.embed(ids), ids)).abs().max()
    return text if difference < (1e-4 if dtype == torch.float32 else 1e-2) else None


def _read_transforms(preprocess: Any) -> tuple[Preprocessing, int]:
    """The preprocessing and image size that torchvision's transforms for evaluation stand for."""
    found: dict[str, Any] = {"resize_mode": None, "interpolation": "bicubic", "mean": OPENAI_MEAN, "std": OPENAI_STD}
    sizes: set[int] = set()
    for step in getattr(preprocess, "transforms", [preprocess]):
        kind = type(step).__name__
        if kind == "Normalize":
            found["mean"], found["std"] = tuple(map(float, step.mean)), tuple(map(float, step.std))
        elif kind in ("Resize", "ResizeKeepRatio"):
            square = not isinstance(step.size, int)
            sizes |= set(step.size) if square else {step.size}
            found["resize_mode"] = "squash" if square else "shortest"
            if kind == "ResizeKeepRatio":
                found["resize_mode"] = {0.0: "shortest", 1.0: "longest"}.get(step.longest)
            found["interpolation"] = getattr(step.interpolation, "value", step.interpolation)
        elif kind in ("CenterCrop", "CenterCropOrPad"):
            sizes |= {step.size} if isinstance(step.size, int) else set(step.size)
            if getattr(step, "fill", 0):
                raise ModelError(f"margins of the colour {step.fill} are not supported, only black ones")
        elif kind not in _NO_OP:
            raise ModelError(
                f"the step {kind} of the preprocessing is not supported: give the one for evaluation, which is the "
                "third of what open_clip.create_model_and_transforms returns"
            )
    if len(sizes) != 1 or found["resize_mode"] is None or found["interpolation"] not in ("bicubic", "bilinear"):
        raise ModelError(f"the preprocessing is not supported: {preprocess}")
    return Preprocessing(**found), sizes.pop()  # type: ignore[typeddict-item]
