"""A file of weights to a CLIP model, and back.

A checkpoint is accepted whole or not at all: every tensor must be there, fit and be finite, and no tensor may be left
over. The activation and the number of heads are not in the tensors, so they come from the file beside the weights, the
architecture's entry in `config.ARCHITECTURES` or the published name. If these disagree, or none of them says, that is
an error, because the wrong choice gives plausible and slightly worse answers. Only the caller may overrule them.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from usetta.models.base import ModelError
from usetta.models.clip import CLIP
from usetta.models.config import (
    ARCHITECTURES,
    Activation,
    CLIPConfig,
    ResNetConfig,
    TextConfig,
    ViTConfig,
    activation_of_name,
)
from usetta.models.layouts import (
    LOGIT_SCALE,
    Layout,
    State,
    detect,
    missing_and_surplus,
    own_shape,
    to_foreign,
    to_own,
)
from usetta.models.sidecar import Sidecar, read_sidecar
from usetta.models.state_files import is_torchscript, read_state, scripted_activation
from usetta.models.tokenizer import CLIPTokenizer, default_tokenizer


def load_checkpoint(
    path: Path,
    *,
    name: str,
    architecture: str | None = None,
    activation: Activation | None = None,
    published_as: str | None = None,
) -> CLIP:
    """The model in `path`.

    architecture: the entry of `ARCHITECTURES` it must have; by default it is inferred.
    activation: the caller's, whatever the file beside the weights and their name say.
    published_as: the id under which the file was published, which may imply the activation; by default its file name.
    """
    state = read_state(path)
    layout = detect(state, str(path))
    beside = read_sidecar(path.parent, layout)
    config, keys = _fitting(state, layout, beside, str(path), architecture)
    activation = activation or _find_activation(path, beside, published_as or path.name)
    config = replace(config, activation=activation, **(beside.preprocessing if beside else {}))
    vocabulary = path.with_name("tokenizer.json")
    tokenizer = CLIPTokenizer.from_json(vocabulary) if vocabulary.is_file() else default_tokenizer()
    return _build(state, layout, keys, config, tokenizer, str(path), name)


def clip_from_state(state: State, beside: Sidecar, tokenizer: CLIPTokenizer, *, name: str) -> CLIP:
    """The model with the weights of `state`, which are copied, and the settings that `beside` states."""
    layout = detect(state, name)
    config, keys = _fitting(state, layout, beside, name, None)
    config = replace(config, activation=beside.activation or config.activation, **beside.preprocessing)
    copied = {key: tensor.detach().clone() for key, tensor in state.items()}
    return _build(copied, layout, keys, config, tokenizer, name, name)


def _fitting(
    state: State, layout: Layout, beside: Sidecar | None, source: str, architecture: str | None
) -> tuple[CLIPConfig, list[str]]:
    """The architecture of `state`, which fills it, and our keys."""
    config = ARCHITECTURES[architecture] if architecture else infer_sizes(state, layout, source)
    keys = _check(state, config, layout, source, architecture)
    return _with_heads(_without_heads(config), beside, source), keys


def _build(
    state: State,
    layout: Layout,
    keys: list[str],
    config: CLIPConfig,
    tokenizer: CLIPTokenizer,
    source: str,
    name: str,
) -> CLIP:
    if tokenizer.vocab_size > config.text.vocab_size:
        raise ModelError(
            f"{source} has embeddings for {config.text.vocab_size} tokens, but its tokenizer has {tokenizer.vocab_size}"
        )
    scale = math.exp(float(state[LOGIT_SCALE]))
    return CLIP.from_state(config, to_own(state, keys, layout), name=name, logit_scale=scale, tokenizer=tokenizer)


def infer_sizes(state: State, layout: Layout, source: str) -> CLIPConfig:
    """The architecture whose shapes the state dict has, with 0 for the numbers of heads, which no shape shows."""

    def shape(key: str) -> tuple[int, ...]:
        own = own_shape(state, key, layout)
        if own is None:
            missing, _ = missing_and_surplus(state, [key], layout)
            raise ModelError(f"{source} does not contain {missing[0]}, so its architecture is unknown")
        return own

    def count(pattern: str) -> int:
        return next(i for i in range(len(state) + 1) if own_shape(state, pattern.format(i), layout) is None)

    text = TextConfig(
        width=shape("text_tower.token_embedding.weight")[1],
        layers=count("text_tower.blocks.{}.ln_1.weight"),
        heads=0,
        context_length=shape("text_tower.positional_embedding")[0],
        vocab_size=shape("text_tower.token_embedding.weight")[0],
    )
    vision: ViTConfig | ResNetConfig
    if own_shape(state, "image_tower.class_embedding", layout):
        width, _, patch, _ = shape("image_tower.patches.weight")
        grid = math.isqrt(shape("image_tower.positional_embedding")[0] - 1)
        vision = ViTConfig(grid * patch, patch, width, layers=count("image_tower.blocks.{}.ln_1.weight"), heads=0)
    else:
        grid = math.isqrt(shape("image_tower.pool.positional_embedding")[0] - 1)
        width = shape("image_tower.stages.0.0.reduce.conv.weight")[0]
        depths = [count(f"image_tower.stages.{stage}.{{}}.reduce.conv.weight") for stage in range(4)]
        vision = ResNetConfig(grid * 32, width, layers=(depths[0], depths[1], depths[2], depths[3]), heads=0)
    return CLIPConfig(shape("text_tower.projection")[1], vision, text)


def _with_heads(config: CLIPConfig, beside: Sidecar | None, source: str) -> CLIPConfig:
    """The same architecture with its numbers of heads, from the table of architectures or the file beside it."""
    known = next((known for known in ARCHITECTURES.values() if _without_heads(known) == config), None)
    if beside and beside.vision_heads and beside.text_heads:
        stated = replace(
            config,
            vision=replace(config.vision, heads=beside.vision_heads),
            text=replace(config.text, heads=beside.text_heads),
        )
        if known and known != stated:
            raise ModelError(f"{beside.path} has different numbers of attention heads than {_describe(known)}")
        return stated
    if known is None:
        raise ModelError(
            f"{source} has an unknown architecture ({_describe(config)}), so its number of attention heads is "
            "unknown; put the published open_clip_config.json or config.json beside it"
        )
    return known


def _without_heads(config: CLIPConfig) -> CLIPConfig:
    return replace(config, vision=replace(config.vision, heads=0), text=replace(config.text, heads=0))


def _describe(config: CLIPConfig) -> str:
    """The name of an architecture, or its sizes."""
    for name, known in ARCHITECTURES.items():
        if _without_heads(known) == _without_heads(config):
            return name
    vision, text = config.vision, config.text
    kind = f"patches of {vision.patch_size}" if isinstance(vision, ViTConfig) else "a residual network"
    return (
        f"{kind}, image size {vision.image_size}, image width {vision.width} x {vision.layers} layers, "
        f"text width {text.width} x {text.layers} layers"
    )


def _find_activation(path: Path, beside: Sidecar | None, published_as: str) -> Activation:
    """The one activation that all sources agree on; else what the file beside means by saying nothing."""
    sources: dict[str, Activation | None] = {
        beside.path.name if beside else "": beside.activation if beside else None,
        "the code in the file": scripted_activation(path) if is_torchscript(path) else None,
        f"the name {published_as}": activation_of_name(published_as),
    }
    stated = {source: value for source, value in sources.items() if value}
    if not stated:
        if beside and beside.default_activation:
            return beside.default_activation
        raise ModelError(
            f"the activation of {path} is unknown: pass activation='quick_gelu' for weights from OpenAI (and other "
            "QuickGELU models) or activation='gelu' for weights from LAION and DataComp"
        )
    if len(set(stated.values())) > 1:
        listed = ", ".join(f"{source} says {value}" for source, value in stated.items())
        raise ModelError(
            f"the activation of {path} is contradictory: {listed}; pass activation='quick_gelu' or 'gelu' to decide"
        )
    return next(iter(stated.values()))


def _check(state: State, config: CLIPConfig, layout: Layout, source: str, architecture: str | None) -> list[str]:
    """Our keys, once `state` is known to fill them all with finite tensors of the right shape."""
    with torch.device("meta"):
        expected = {key: tuple(tensor.shape) for key, tensor in CLIP(config, name="").state_dict().items()}
    missing, surplus = missing_and_surplus(state, expected, layout)
    shapes = {key: (own_shape(state, key, layout), shape) for key, shape in expected.items()}
    wrong = [f"{key} is {actual}, not {shape}" for key, (actual, shape) in shapes.items() if actual and actual != shape]
    problems = [f"wrong shapes: {_first_few(wrong)}"] if wrong else []
    problems += [f"missing keys: {_first_few(missing)}"] if missing else []
    problems += [f"surplus keys: {_first_few(surplus)}"] if surplus else []
    if problems:
        wanted = architecture or _describe(config)
        raise ModelError(
            f"{source} does not fit {wanted}{_looks_like(state, layout, architecture)}; {'; '.join(problems)}"
        )
    infinite = [key for key, tensor in state.items() if not _finite(tensor)]
    if infinite:
        raise ModelError(f"{source} has NaN or infinite values in {_first_few(infinite)}")
    return list(expected)


def _finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass and without the temporary tensor of `isfinite`."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _looks_like(state: State, layout: Layout, architecture: str | None) -> str:
    try:
        inferred = _describe(infer_sizes(state, layout, ""))
    except ModelError:
        return ""
    return f" (it holds {inferred})" if inferred != architecture else ""


def _first_few(items: list[str], limit: int = 3) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest


def export_state(model: CLIP, layout: Layout) -> State:
    """The weights of `model` under the names of another layout (`openai` is also open_clip's)."""
    scale = torch.tensor(math.log(model.logit_scale))
    return {**to_foreign(model.state_dict(), layout), LOGIT_SCALE: scale}


def save_model(model: CLIP, folder: Path) -> Path:
    """Write `model` as open_clip would: safetensors with the configuration beside it. Returns the weights' path."""
    config = model.config
    vision, text = config.vision, config.text
    patch = vision.patch_size if isinstance(vision, ViTConfig) else None
    width = vision.width if isinstance(vision, ViTConfig) else vision.pool_width
    described = {
        "model_cfg": {
            "embed_dim": config.embed_dim,
            "quick_gelu": config.activation == "quick_gelu",
            "vision_cfg": {
                "image_size": vision.image_size,
                "layers": vision.layers,
                "width": vision.width,
                "patch_size": patch,
                "head_width": width // vision.heads,
            },
            "text_cfg": {
                "context_length": text.context_length,
                "vocab_size": text.vocab_size,
                "width": text.width,
                "heads": text.heads,
                "layers": text.layers,
            },
        },
        "preprocess_cfg": {
            "mean": config.mean,
            "std": config.std,
            "interpolation": config.interpolation,
            "resize_mode": config.resize_mode,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    path = folder / "open_clip_model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in export_state(model, "openai").items()}, path)
    return path
