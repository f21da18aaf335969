"""The configuration beside a file of weights, which says what the tensors cannot: activation, heads, preprocessing.

open_clip writes `open_clip_config.json`, transformers `config.json` and `preprocessor_config.json`. A setting that
would change the features and is not implemented here is an error, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from usetta.models.base import ModelError
from usetta.models.config import Activation
from usetta.models.layouts import Layout
from usetta.views.recipe import Interpolation, ResizeMode

Statistics = tuple[float, float, float]

# Settings of open_clip that show in the shapes, restate the only choice implemented here, or affect training only.
_OPEN_CLIP_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio", "patch_dropout"}
_OPEN_CLIP_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"}
_OPEN_CLIP_DEFAULTS: dict[str, set[Any]] = {
    "pool_type": {"tok", "argmax"},
    "proj_type": {"linear"},
    "final_ln_after_pool": {False},
}

# "random" is for training; open_clip then resizes test images by the bicubic filter.
_OPEN_CLIP_FILTERS: dict[str, Interpolation] = {"bicubic": "bicubic", "bilinear": "bilinear", "random": "bicubic"}
_PILLOW_FILTERS: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}


class Preprocessing(TypedDict, total=False):
    """How the weak view is made and normalised; keys are missing where the configuration is silent."""

    mean: Statistics
    std: Statistics
    resize_mode: ResizeMode
    interpolation: Interpolation


@dataclass(frozen=True)
class Sidecar:
    """The part of a configuration that cannot be read off the weights; None where the file is silent."""

    path: Path
    activation: Activation | None = None
    default_activation: Activation | None = None
    """What the library that wrote the file takes where it is silent."""
    vision_heads: int | None = None
    text_heads: int | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)


def read_sidecar(folder: Path, layout: Layout) -> Sidecar | None:
    """The configuration that belongs to weights of this layout in `folder`; None if there is none."""
    path = folder / ("open_clip_config.json" if layout == "openai" else "config.json")
    if not path.is_file():
        return None
    config = read_json(path)
    try:
        if layout == "openai":
            return _from_open_clip(path, config)
        if config.get("model_type") != "clip":
            return None
        return sidecar_of_transformers(path, config, read_processor(folder))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{path} is not the configuration of a CLIP model ({error!r})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must contain a JSON object, not a {type(content).__name__}")
    return content


# --- open_clip -------------------------------------------------------------------------------------------------------


def _from_open_clip(path: Path, config: dict[str, Any]) -> Sidecar:
    model, preprocess = config["model_cfg"], config.get("preprocess_cfg", {})
    vision, text = model["vision_cfg"], model["text_cfg"]
    _refuse_unknown(path, "vision_cfg", vision, _OPEN_CLIP_VISION)
    _refuse_unknown(path, "text_cfg", text, _OPEN_CLIP_TEXT)
    residual = isinstance(vision["layers"], list)
    stated = model.get("quick_gelu")
    return Sidecar(
        path,
        activation=None if stated is None else "quick_gelu" if stated else "gelu",
        default_activation="gelu",
        vision_heads=vision["width"] * (32 if residual else 1) // vision.get("head_width", 64),
        text_heads=text.get("heads", 8),
        preprocessing=_open_clip_preprocessing(path, preprocess, vision.get("image_size", 224)),
    )


def _refuse_unknown(path: Path, part: str, config: dict[str, Any], known: set[str]) -> None:
    for key, value in config.items():
        if value and key not in known and value not in _OPEN_CLIP_DEFAULTS.get(key, set()):
            raise ModelError(f"{path} specifies {part}.{key} = {value!r}, which is not supported")


def _open_clip_preprocessing(path: Path, config: Mapping[str, Any], image_size: int) -> Preprocessing:
    settings = _statistics(config.get("mean"), config.get("std"))
    side = config.get("size") or image_size
    if set(side if isinstance(side, list) else [side]) != {image_size}:
        raise _unsupported(path, "preprocess_cfg.size", side)
    mode: Any = config.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash", "longest"):
        raise _unsupported(path, "preprocess_cfg.resize_mode", mode)
    if mode == "longest" and config.get("fill_color"):
        raise _unsupported(path, "preprocess_cfg.fill_color", config["fill_color"])
    interpolation = config.get("interpolation") or "bicubic"
    if interpolation not in _OPEN_CLIP_FILTERS:
        raise _unsupported(path, "preprocess_cfg.interpolation", interpolation)
    return {**settings, "resize_mode": mode, "interpolation": _OPEN_CLIP_FILTERS[interpolation]}


# --- transformers ----------------------------------------------------------------------------------------------------


def sidecar_of_transformers(path: Path, config: dict[str, Any], processor: Mapping[str, Any]) -> Sidecar:
    """What transformers' configurations of a CLIP and of its image processor say; `path` names them in errors."""
    vision, text = config["vision_config"], config["text_config"]
    activations = {part.get("hidden_act", "quick_gelu") for part in (vision, text)}
    if not activations <= {"quick_gelu", "gelu"} or len(activations) > 1:
        raise ModelError(f"{path} specifies the activations {sorted(activations)}; supported are quick_gelu and gelu")
    for part in (vision, text):
        if part.get("layer_norm_eps", 1e-5) != 1e-5:
            raise ModelError(f"{path} specifies layer_norm_eps = {part['layer_norm_eps']}, which is not supported")
    return Sidecar(
        path,
        activation=activations.pop(),
        vision_heads=vision.get("num_attention_heads", 12),
        text_heads=text.get("num_attention_heads", 8),
        preprocessing=processor_settings(
            path.with_name("preprocessor_config.json"), processor, vision.get("image_size", 224)
        ),
    )


def read_processor(folder: Path) -> dict[str, Any]:
    """The configuration of transformers' image processor, empty if there is none."""
    path = folder / "preprocessor_config.json"
    return read_json(path) if path.is_file() else {}


def processor_settings(source: Path | str, config: Mapping[str, Any], image_size: int) -> Preprocessing:
    """What transformers' image processor with this configuration does; `source` names it in errors."""
    settings = _statistics(config.get("image_mean"), config.get("image_std"))
    if config.get("do_normalize") is False:
        settings = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if config.get("do_resize") is False:
        raise _unsupported(source, "do_resize", value=False)
    if abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6 or config.get("do_rescale") is False:
        raise _unsupported(source, "rescale_factor", config.get("rescale_factor"))
    if config.get("resample") is not None:
        if config["resample"] not in _PILLOW_FILTERS:
            raise _unsupported(source, "resample", config["resample"])
        settings["interpolation"] = _PILLOW_FILTERS[config["resample"]]
    size = config.get("size")
    if size is None:
        return settings
    crop = config.get("crop_size") if config.get("do_center_crop", True) else None
    sides = {value for value in _sides(size) | _sides(crop) if value is not None}
    squash = isinstance(size, Mapping) and "height" in size
    if sides != {image_size} or not (squash or crop):
        raise _unsupported(source, "size", f"{size} and crop_size = {crop}")
    return {**settings, "resize_mode": "squash" if squash else "shortest"}


def _sides(size: Any) -> set[int | None]:
    """The side lengths that a `size` of transformers states; a wrong one for a longest edge, which nothing equals."""
    if not isinstance(size, Mapping):
        return {size}
    return {value if key in ("height", "width", "shortest_edge") else -1 for key, value in size.items()}


def _statistics(mean: Any, std: Any) -> Preprocessing:
    stated = Preprocessing()
    if mean is not None:
        stated["mean"] = _three(mean)
    if std is not None:
        stated["std"] = _three(std)
    return stated


def _three(values: Any) -> Statistics:
    red, green, blue = (float(value) for value in (values if isinstance(values, list | tuple) else [values] * 3))
    return red, green, blue


def _unsupported(source: Path | str, name: str, value: object) -> ModelError:
    return ModelError(f"{source} specifies {name} = {value}, which is not supported")
