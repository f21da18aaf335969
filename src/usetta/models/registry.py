"""Models by name.

`load_model` takes a name of `list_models` or a usual spelling of it, the id of a hub repository, or the path of a file
or folder of weights. Every name is a `ModelEntry` in one registry, which other packages join by `register_model` or an
entry point of the group `usetta.models`.

A model that was named is never replaced by another. Only `auto` chooses: CLIP ViT-B/16, or the embedded model where
CLIP's weights are neither in the cache nor reachable. Since the two answer differently, that choice is logged, and the
model's name shows it.
"""

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from usetta.models.base import Model, ModelError, UnknownModelError
from usetta.models.config import ARCHITECTURES, Activation
from usetta.registry import Registry

if TYPE_CHECKING:
    import torch

    from usetta.models.adapters import Siglip
    from usetta.models.clip import CLIP
    from usetta.models.towers import TwoTowers

PREFERRED = "ViT-B-16"
"""What `auto` is, where its weights can be had."""

_OPEN_CLIP_FILE = "open_clip_model.safetensors"

# Best first: repositories of timm hold their image tower alone as model.safetensors beside open_clip's file.
_WEIGHT_FILES = (_OPEN_CLIP_FILE, "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")

_log = logging.getLogger("usetta")


@dataclass(frozen=True)
class LoadOptions:
    """What the caller of `load_model` wants of a model that is known by name."""

    device: "torch.device"
    cache_dir: Path | None = None
    """Of the hub; None is its usual one."""
    offline: bool = False
    activation: Activation | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A model that has a name. An entry point of the group `usetta.models` names one of these."""

    load: Callable[[LoadOptions], Model]
    """Loads it in float32, on the device that the options name."""
    architecture: str = "its own"
    source: str = "plug-in"
    description: str = ""
    is_cached: Callable[[Path | None], bool] = lambda _cache_dir: True
    """Whether it loads without a network."""


@dataclass(frozen=True)
class ModelRow:
    """One row of `usetta ls models`."""

    name: str
    architecture: str
    source: str
    description: str
    cached: bool


def _plain(name: str) -> str:
    """What all spellings of a name have in common: `ViT-B/16`, `vit_b16`; `ViT-L/14@336px`, `ViT-L-14-336`."""
    return re.sub(r"[^a-z0-9]", "", name.lower().removesuffix("px"))


def _unknown(message: str) -> UnknownModelError:
    """With the two other ways to name a model, unless the message suggests one."""
    return UnknownModelError(message if message.endswith("?") else f"{message}, a hub id or a file")


_MODELS: Registry[ModelEntry] = Registry("model", group="usetta.models", normalize=_plain, error=_unknown)


def register_model(name: str, entry: ModelEntry) -> None:
    """Make a model known by `name`, which must not be taken."""
    _MODELS.register(name, entry)


def unregister_model(name: str) -> None:
    """Forget a model that was registered."""
    _MODELS.unregister(name)


def list_models(cache_dir: Path | None = None) -> list[ModelRow]:
    """The models that have a name, those of plug-ins last."""
    return [
        ModelRow(name, entry.architecture, entry.source, entry.description, entry.is_cached(cache_dir))
        for name, entry in _MODELS.items()
    ]


def canonical_name(name: str) -> str | None:
    """The model or architecture that `name` spells in another way (`ViT-B/16`, `vit_b16`, `ViT-L/14@336px`), if any."""
    return _MODELS.canonical(name) or _architecture(name)


def _architecture(name: str) -> str | None:
    return next((known for known in ARCHITECTURES if _plain(known) == _plain(name)), None)


def load_model(
    name: str,
    *,
    weights: str | Path | None = None,
    activation: Activation | None = None,
    device: "str | torch.device | None" = "auto",
    precision: str = "auto",
    compiled: bool = False,
    for_device: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    seed: int = 0,
) -> Model:
    """Load a model.

    name: a name of `list_models`, a hub id (`org/repo`, or `org/repo@revision`), or a path of a file or folder.
    weights: a local file with weights for the named architecture, or "random" for meaningless ones drawn from `seed`.
    activation: "quick_gelu" or "gelu", to overrule the configuration beside the weights, or where nothing says.
    device: "auto" (CUDA, else MPS, else CPU) or a device of torch.
    precision: of the image tower: fp32, bf16, fp16 (on a GPU), int8 (on a CPU), or "auto", the fastest that agrees with
        fp32 (see `precision.resolve_precision`).
    compiled: let `torch.compile` translate the image tower when it is first used, which takes a minute; not for int8.
    for_device: the type of device that workers have, for a driver that loads the model they compute with but has no
        such device: the precision is right there, and this model may not be able to compute.
    offline: use what is in the cache, never the network.
    """
    import torch

    from usetta.models.precision import check_precision, prepare, resolve_device

    check_precision(precision)
    options = LoadOptions(resolve_device(device), cache_dir, offline, activation)
    model = _load(name, weights, options, seed)
    prepare(model, precision, compiled=compiled, for_device=torch.device(for_device) if for_device else None)
    return model


def pull_model(name: str, log: Callable[[str], object]) -> Path | str:
    """Fetch what a model needs into the cache, so that it loads offline afterwards; returns where that is."""
    known = canonical_name(name) or name
    if known == "embedded":
        from usetta.models import embedded

        return embedded.pull(log)
    log(f"downloading {known}")
    load_model(known, device="cpu", precision="fp32")
    return "the hub's cache"


def _load(name: str, weights: str | Path | None, options: LoadOptions, seed: int) -> Model:
    if weights is not None:
        architecture = _architecture(name)
        if architecture is None:
            raise ModelError(
                f"with weights, the model must be an architecture, not '{name}'; known: {', '.join(ARCHITECTURES)}"
            )
        if weights == "random":
            return _random(architecture, options.activation, seed).to(options.device)
        path = Path(weights).expanduser()
        return _from_path(path, options.activation, architecture=architecture).to(options.device)
    entry = _MODELS.find(name)
    if entry is not None:
        return entry.load(options)
    if architecture := _architecture(name):
        raise ModelError(f"there are no known weights for {architecture}: use a weights file (--model FILE)")
    path = Path(name).expanduser()
    if path.exists() or path.suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        return _from_path(path, options.activation).to(options.device)
    if _is_hub_id(name):
        return _from_hub(name, options).to(options.device)
    return _MODELS.get(name).load(options)  # which raises the error that suggests a name


def _random(name: str, activation: Activation | None, seed: int) -> "CLIP":
    from usetta.models.clip import random_model

    warnings.warn(f"{name} has random weights: its answers mean nothing", stacklevel=4)
    config = ARCHITECTURES[name]
    return random_model(replace(config, activation=activation or config.activation), name=f"{name}-random", seed=seed)


# --- files and folders, and the hub ----------------------------------------------------------------------------------


def _from_path(path: Path, activation: Activation | None, architecture: str | None = None) -> "TwoTowers":
    from usetta.models.checkpoints import load_checkpoint

    if path.is_dir():
        if architecture is None and _is_siglip(path / "config.json"):
            return _siglip(path, path.name)
        if architecture is None and _needs_open_clip(path / "open_clip_config.json"):
            return _by_open_clip(f"local-dir:{path.resolve()}", path.name)
        files = [path / file for file in _WEIGHT_FILES if (path / file).is_file()]
        if not files:
            raise ModelError(f"{path} contains no weights, that is none of {', '.join(_WEIGHT_FILES)}")
        path = files[0]
    return load_checkpoint(path, name=architecture or path.stem, architecture=architecture, activation=activation)


def _from_hub(name: str, options: LoadOptions) -> "TwoTowers":
    from usetta.models.checkpoints import load_checkpoint
    from usetta.models.hub import download_optional

    repo, _, revision = name.partition("@")

    def optional(file: str) -> Path | None:
        return download_optional(
            repo, file, revision=revision or None, cache_dir=options.cache_dir, offline=options.offline
        )

    config = optional("config.json")
    if config and _is_siglip(config):
        from usetta.models.adapters import SIGLIP_FILES

        for file in SIGLIP_FILES:
            optional(file)
        return _siglip(config.parent, name)
    config = optional("open_clip_config.json")
    if config and _needs_open_clip(config):
        if revision or options.offline:
            raise ModelError(
                f"{repo} is loaded by open_clip, which takes the newest revision: leave out '@{revision}'"
                if revision
                else f"{repo} is loaded by open_clip: to keep it from the network, set HF_HUB_OFFLINE=1"
            )
        return _by_open_clip(f"hf-hub:{repo}", name, options.cache_dir)
    for file in _WEIGHT_FILES:
        path = optional(file)
        if path:
            for companion in _companions(file):
                optional(companion)
            return load_checkpoint(path, name=name, activation=options.activation, published_as=repo)
    where = "the cache" if options.offline else "the hub"
    raise ModelError(f"{repo} has no supported weights in {where}, that is none of {', '.join(_WEIGHT_FILES)}")


def _companions(file: str) -> tuple[str, ...]:
    """The files that hold what cannot be read off the weights."""
    if file.startswith("open_clip"):
        return ("open_clip_config.json",)
    return ("config.json", "preprocessor_config.json", "tokenizer.json")


def _is_siglip(config: Path) -> bool:
    from usetta.models.sidecar import read_json

    return config.is_file() and str(read_json(config).get("model_type")).startswith("siglip")


def _needs_open_clip(config: Path) -> bool:
    """Whether one of the towers is not CLIP's, by open_clip's configuration."""
    from usetta.models.sidecar import read_json

    model = read_json(config).get("model_cfg") if config.is_file() else None
    if not isinstance(model, dict):
        return False
    vision, text = model.get("vision_cfg") or {}, model.get("text_cfg") or {}
    return bool(vision.get("timm_model_name") or text.get("hf_model_name") or model.get("custom_text"))


def _by_open_clip(location: str, name: str, cache_dir: Path | None = None) -> "TwoTowers":
    from usetta.models.objects import from_open_clip

    model = from_open_clip(location, device="cpu", precision="fp32", cache_dir=cache_dir)
    model.name = name
    return model


def _siglip(folder: Path, name: str) -> "Siglip":
    from usetta.models.adapters import load_siglip

    return load_siglip(folder, name=name)


def _is_hub_id(name: str) -> bool:
    """Whether `name` can be `org/repo` or `org/repo@revision`, and is not a misspelt `ViT-B/16`."""
    families = {architecture.rsplit("-", 1)[0].lower() for architecture in ARCHITECTURES}
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name)) and name.split("/")[0].lower() not in families


# --- the models of this package --------------------------------------------------------------------------------------


def published_clip(name: str, repo: str, description: str, *, file: str = _OPEN_CLIP_FILE) -> ModelEntry:
    """A CLIP of the architecture `name`, published in `file` of a hub repository."""
    return ModelEntry(
        partial(_load_published, name, repo, file),
        architecture=name,
        source=repo,
        description=description,
        is_cached=partial(_is_published_cached, repo, file),
    )


def _load_published(name: str, repo: str, file: str, options: LoadOptions) -> Model:
    from usetta.models.checkpoints import load_checkpoint
    from usetta.models.hub import NotInCacheError, download, download_optional

    path = download(repo, file, cache_dir=options.cache_dir, offline=options.offline)
    for companion in _companions(file):
        # It only confirms what is known here of these weights, so they can be used without it.
        with suppress(NotInCacheError):
            download_optional(repo, companion, cache_dir=options.cache_dir, offline=options.offline)
    model = load_checkpoint(path, name=name, architecture=name, activation=options.activation, published_as=repo)
    return model.to(options.device)


def _is_published_cached(repo: str, file: str, cache_dir: Path | None) -> bool:
    from usetta.models import hub

    return hub.is_cached(repo, file, cache_dir)


def _load_embedded(options: LoadOptions) -> Model:
    from usetta.models import embedded

    return embedded.load(_log.warning, offline=options.offline).to(options.device)


def _is_embedded_cached(_cache_dir: Path | None) -> bool:
    from usetta.models import embedded

    return embedded.is_cached()


def _load_auto(options: LoadOptions) -> Model:
    from usetta.models.hub import NotInCacheError

    try:
        return _MODELS.get(PREFERRED).load(options)
    except NotInCacheError as error:  # no other error: weights that are damaged or do not fit must not go unnoticed
        _log.warning(
            "CLIP %s is not on this machine and cannot be downloaded: the embedded model is used, which answers "
            "differently; once online, run `usetta models pull %s`",
            PREFERRED,
            PREFERRED,
        )
        _log.info("%s", error)
        return _load_embedded(options)


def _is_auto_cached(cache_dir: Path | None) -> bool:
    return _MODELS.get(PREFERRED).is_cached(cache_dir) or _is_embedded_cached(cache_dir)


register_model(
    "auto",
    ModelEntry(
        _load_auto,
        PREFERRED,
        "hub or package index",
        f"{PREFERRED} if its weights can be had, else embedded",
        _is_auto_cached,
    ),
)
register_model(
    "embedded",
    ModelEntry(
        _load_embedded,
        PREFERRED,
        "package index",
        "CLIP's ViT-B/16 image tower with a small text tower; needs no hub",
        _is_embedded_cached,
    ),
)
for _name, _repo, _description in (
    ("ViT-B-32", "timm/vit_base_patch32_clip_224.openai", "OpenAI's fastest"),
    ("ViT-B-16", "timm/vit_base_patch16_clip_224.openai", "the paper's main model"),
    ("ViT-L-14", "timm/vit_large_patch14_clip_224.openai", "OpenAI's large model"),
    ("ViT-L-14-336", "timm/vit_large_patch14_clip_336.openai", "the same at 336 pixels"),
    ("RN50", "timm/resnet50_clip.openai", "the paper's residual network"),
):
    register_model(_name, published_clip(_name, _repo, _description))
