"""What the configuration file beside a weights file says that the weights cannot: activation, heads, pixel statistics.

open_clip writes `open_clip_config.json`, transformers `config.json` and `preprocessor_config.json`. A setting that
would change the features and is not implemented here is an error, never ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usetta.models.base import ModelError
from usetta.models.config import Activation
from usetta.models.layouts import Layout

Statistics = tuple[float, float, float]

# Settings of open_clip that show in the shapes, restate the only choice implemented here, or affect training only.
_OPEN_CLIP_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio", "patch_dropout"}
_OPEN_CLIP_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"}
_OPEN_CLIP_DEFAULTS: dict[str, set[Any]] = {
    "pool_type": {"tok", "argmax"},
    "proj_type": {"linear"},
    "final_ln_after_pool": {False},
}


@dataclass(frozen=True)
class Sidecar:
    """The part of a configuration that cannot be read off the weights; None where the file is silent."""

    path: Path
    activation: Activation | None = None
    vision_heads: int | None = None
    text_heads: int | None = None
    mean: Statistics | None = None
    std: Statistics | None = None


def read_sidecar(folder: Path, layout: Layout) -> Sidecar | None:
    """The configuration that belongs to weights of this layout in `folder`; None if there is none."""
    path = folder / ("open_clip_config.json" if layout == "openai" else "config.json")
    if not path.is_file():
        return None
    config = read_json(path)
    try:
        if layout == "openai":
            return _from_open_clip(path, config)
        return _from_transformers(path, config) if config.get("model_type") == "clip" else None
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{path} is not the configuration of a CLIP model ({error!r})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def _from_open_clip(path: Path, config: dict[str, Any]) -> Sidecar:
    model, preprocess = config["model_cfg"], config.get("preprocess_cfg", {})
    vision, text = model["vision_cfg"], model["text_cfg"]
    _refuse_unknown(path, "vision_cfg", vision, _OPEN_CLIP_VISION)
    _refuse_unknown(path, "text_cfg", text, _OPEN_CLIP_TEXT)
    residual = isinstance(vision["layers"], list)
    return Sidecar(
        path,
        activation="quick_gelu" if model.get("quick_gelu") else "gelu",
        vision_heads=vision["width"] * (32 if residual else 1) // vision.get("head_width", 64),
        text_heads=text.get("heads", 8),
        mean=statistics(preprocess.get("mean")),
        std=statistics(preprocess.get("std")),
    )


def _refuse_unknown(path: Path, part: str, config: dict[str, Any], known: set[str]) -> None:
    for key, value in config.items():
        if value and key not in known and value not in _OPEN_CLIP_DEFAULTS.get(key, set()):
            raise ModelError(f"{path} asks for {part}.{key} = {value!r}, which is not supported")


def _from_transformers(path: Path, config: dict[str, Any]) -> Sidecar:
    vision, text = config["vision_config"], config["text_config"]
    activations = {part.get("hidden_act", "quick_gelu") for part in (vision, text)}
    if not activations <= {"quick_gelu", "gelu"} or len(activations) > 1:
        raise ModelError(
            f"{path} asks for the activations {sorted(activations)}; supported is one of quick_gelu and gelu"
        )
    for part in (vision, text):
        if part.get("layer_norm_eps", 1e-5) != 1e-5:
            raise ModelError(f"{path} asks for layer_norm_eps = {part['layer_norm_eps']}, which is not supported")
    processor = path.with_name("preprocessor_config.json")
    pixels = read_json(processor) if processor.is_file() else {}
    return Sidecar(
        path,
        activation=activations.pop(),
        vision_heads=vision.get("num_attention_heads", 12),
        text_heads=text.get("num_attention_heads", 8),
        mean=statistics(pixels.get("image_mean")),
        std=statistics(pixels.get("image_std")),
    )


def statistics(values: Any) -> Statistics | None:
    """Three numbers, one for each channel, or None."""
    if values is None:
        return None
    red, green, blue = (float(value) for value in values)
    return red, green, blue
