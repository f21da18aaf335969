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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from usetta.models.base import Model, ModelError, UnknownModelError
from usetta.models.config import ARCHITECTURES, Activation
from usetta.models.sources import OPEN_CLIP_FILE, companions, from_hub, from_openai, from_path
from usetta.registry import Registry

if TYPE_CHECKING:
    import torch

    from usetta.models.clip import CLIP

PREFERRED = "ViT-B-16"
"""What `auto` is, where its weights can be had."""

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
    revision: str | None = None
    """Of the hub's repository; None is the one that was checked, or else the newest."""


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
    revision: str | None = None,
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
    revision: of the hub's repository (a commit, branch or tag); by default the one that the name stands for, which is a
        fixed commit for the models of this package, and the newest for a hub id.
    """
    import torch

    from usetta.models.precision import check_precision, prepare, resolve_device

    check_precision(precision)
    options = LoadOptions(resolve_device(device), cache_dir, offline, activation, revision)
    model = _load(name, weights, options, seed)
    prepare(model, precision, compiled=compiled, for_device=torch.device(for_device) if for_device else None)
    return model


def pull_model(name: str, log: Callable[[str], object]) -> Path | str:
    """Fetch what a model needs into the cache, so that it loads offline afterwards; returns where that is."""
    known = canonical_name(name) or name
    if known == "embedded":
        from usetta.models import embedded

        return embedded.pull(log)
    from usetta.models.hub import DamagedFileError

    log(f"downloading {known}")
    try:
        load_model(known, device="cpu", precision="fp32")
    except DamagedFileError as error:
        log(str(error))
        load_model(known, device="cpu", precision="fp32")
    return "the hub's cache"


def repair_models(log: Callable[[str], object]) -> Iterator[str]:
    """The models of this machine by name, after their weights were checked, and fetched again where damaged."""
    for name, entry in _MODELS.items():
        if name != "auto" and entry.is_cached(None):
            pull_model(name, log)
            yield name


def _load(name: str, weights: str | Path | None, options: LoadOptions, seed: int) -> Model:
    if weights is not None:
        _refuse_revision(options)
        architecture = _architecture(name)
        if architecture is None:
            raise ModelError(
                f"with weights, the model must be an architecture, not '{name}'; known: {', '.join(ARCHITECTURES)}"
            )
        if weights == "random":
            return _random(architecture, options.activation, seed).to(options.device)
        path = Path(weights).expanduser()
        return from_path(path, options.activation, architecture=architecture).to(options.device)
    entry = _MODELS.find(name)
    if entry is not None:
        return entry.load(options)
    if architecture := _architecture(name):
        if model := from_openai(architecture, options):
            return model
        raise ModelError(f"there are no known weights for {architecture}: use a weights file (--model FILE)")
    path = Path(name).expanduser()
    if path.exists() or path.suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        _refuse_revision(options)
        return from_path(path, options.activation).to(options.device)
    if _is_hub_id(name):
        return from_hub(name, options).to(options.device)
    return _MODELS.get(name).load(options)  # which raises the error that suggests a name


def _refuse_revision(options: LoadOptions) -> None:
    if options.revision:
        raise ModelError(f"a file has no revision {options.revision}: only models from the hub do")


def _random(name: str, activation: Activation | None, seed: int) -> "CLIP":
    from usetta.models.clip import random_model

    warnings.warn(f"{name} has random weights: its answers mean nothing", stacklevel=4)
    config = ARCHITECTURES[name]
    return random_model(replace(config, activation=activation or config.activation), name=f"{name}-random", seed=seed)


def _is_hub_id(name: str) -> bool:
    """Whether `name` can be `org/repo` or `org/repo@revision`, and is not a misspelt `ViT-B/16`."""
    families = {architecture.rsplit("-", 1)[0].lower() for architecture in ARCHITECTURES}
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name)) and name.split("/")[0].lower() not in families


# --- the models of this package --------------------------------------------------------------------------------------


def published_clip(
    name: str, repo: str, description: str, *, file: str = OPEN_CLIP_FILE, revision: str | None = None
) -> ModelEntry:
    """A CLIP of the architecture `name`, published in `file` of a hub repository, by default of this `revision`."""
    return ModelEntry(
        partial(_load_published, name, repo, file, revision),
        architecture=name,
        source=repo,
        description=description,
        is_cached=partial(_is_published_cached, name, repo, file, revision),
    )


def _load_published(name: str, repo: str, file: str, pinned: str | None, options: LoadOptions) -> Model:
    from usetta.models import hub
    from usetta.models.checkpoints import load_checkpoint

    revision = options.revision or pinned
    cached = hub.is_cached(repo, file, options.cache_dir, revision)
    # OpenAI's own file has the same weights, and may be here already.
    if not cached and not options.revision and (local := from_openai(name, options)):
        return local
    path = hub.download(repo, file, revision=revision, cache_dir=options.cache_dir, offline=options.offline)
    for companion in companions(file):
        # It only confirms what is known here of these weights, so they can be used without it.
        with suppress(hub.NotInCacheError):
            hub.download_optional(
                repo, companion, revision=revision, cache_dir=options.cache_dir, offline=options.offline
            )
    model = load_checkpoint(path, name=name, architecture=name, activation=options.activation, published_as=repo)
    return model.to(options.device)


def _is_published_cached(name: str, repo: str, file: str, revision: str | None, cache_dir: Path | None) -> bool:
    from usetta.models import hub, openai_files

    return hub.is_cached(repo, file, cache_dir, revision) or openai_files.find(name) is not None


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
# The revisions that public material names with the SHA-256 of their weights; looked up on 2026-11-18.
for _name, _repo, _revision, _description in (
    (
        "ViT-B-32",
        "timm/vit_base_patch32_clip_224.openai",
        "a6f597a30f7b82c51704746581f9a4e41421e878",
        "OpenAI's fastest",
    ),
    (
        "ViT-B-16",
        "timm/vit_base_patch16_clip_224.openai",
        "977e3dd0ec55ab8da155f2fbeb6b5f54948b6e3d",
        "the paper's main model",
    ),
    (
        "ViT-L-14",
        "timm/vit_large_patch14_clip_224.openai",
        "18d0535469bb561bf468d76c1d73aa35156c922b",
        "OpenAI's large model",
    ),
    (
        "ViT-L-14-336",
        "timm/vit_large_patch14_clip_336.openai",
        "81e38efc4637de5023b10e75a7f9bd1c6fa6b010",
        "the same at 336 pixels",
    ),
    (
        "RN50",
        "timm/resnet50_clip.openai",
        "ec3d92cf63a5f9d591f0d611b736895966c73076",
        "the paper's residual network",
    ),
):
    register_model(_name, published_clip(_name, _repo, _description, revision=_revision))
