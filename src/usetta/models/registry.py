"""Models by name.

`load_model` understands a name of the table below or a usual spelling of it, the id of a hub repository, or the path of
a file or folder of weights. A model that does not come from the hub, such as the embedded one, registers a loader
under its name (`register`).
"""

import difflib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from usetta.models.base import Model, ModelError, UnknownModelError
from usetta.models.config import ARCHITECTURES, Activation

if TYPE_CHECKING:
    import torch

    from usetta.models.adapters import Siglip
    from usetta.models.clip import CLIP


class Loader(Protocol):
    """Loads a model that is not one of the table."""

    def __call__(self, *, device: "str | torch.device | None", cache_dir: Path | None, offline: bool) -> Model: ...


@dataclass(frozen=True)
class Published:
    """Where the weights of a named model are."""

    architecture: str
    repo: str
    file: str
    activation: Activation
    description: str
    revision: str | None = None


@dataclass(frozen=True)
class Registered:
    """A model that brings its own loader."""

    load: Loader
    architecture: str
    source: str
    description: str
    cached: Callable[[], bool]


@dataclass(frozen=True)
class ModelRow:
    """One line of `usetta ls models`."""

    name: str
    architecture: str
    source: str
    description: str
    cached: bool


_OPEN_CLIP_FILE = "open_clip_model.safetensors"

PUBLISHED: dict[str, Published] = {
    "ViT-B-32": Published(
        "ViT-B-32", "timm/vit_base_patch32_clip_224.openai", _OPEN_CLIP_FILE, "quick_gelu", "OpenAI's fastest"
    ),
    "ViT-B-16": Published(
        "ViT-B-16", "timm/vit_base_patch16_clip_224.openai", _OPEN_CLIP_FILE, "quick_gelu", "the paper's main model"
    ),
    "ViT-L-14": Published(
        "ViT-L-14", "timm/vit_large_patch14_clip_224.openai", _OPEN_CLIP_FILE, "quick_gelu", "OpenAI's large model"
    ),
    "ViT-L-14-336": Published(
        "ViT-L-14-336",
        "timm/vit_large_patch14_clip_336.openai",
        _OPEN_CLIP_FILE,
        "quick_gelu",
        "the same at 336 pixels",
    ),
    "RN50": Published(
        "RN50", "timm/resnet50_clip.openai", _OPEN_CLIP_FILE, "quick_gelu", "the paper's residual network"
    ),
}

_REGISTERED: dict[str, Registered] = {}

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")

# Best first: repositories of timm hold their image tower alone as model.safetensors beside open_clip's file.
_WEIGHT_FILES = (_OPEN_CLIP_FILE, "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")


def register(name: str, model: Registered) -> None:
    """Make a model with its own loader known as `name`."""
    _REGISTERED[name] = model


def list_models(cache_dir: Path | None = None) -> list[ModelRow]:
    """The models that have a name, those with their own loader first."""
    from usetta.models import hub

    rows = [
        ModelRow(name, model.architecture, model.source, model.description, model.cached())
        for name, model in _REGISTERED.items()
    ]
    for name, model in PUBLISHED.items():
        cached = hub.is_cached(model.repo, model.file, cache_dir)
        rows.append(ModelRow(name, model.architecture, model.repo, model.description, cached))
    return rows


def canonical_name(name: str) -> str | None:
    """The name in the table that `name` spells in another way (`ViT-B/16`, `vit_b16`, `ViT-L/14@336px`), if any."""
    for known in (*_REGISTERED, *ARCHITECTURES):
        if _plain(name) == _plain(known):
            return known
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removesuffix("px"))


def load_model(
    name: str,
    *,
    weights: str | Path | None = None,
    activation: Activation | None = None,
    device: "str | torch.device | None" = None,
    precision: str = "fp32",
    compiled: bool = False,
    cache_dir: Path | None = None,
    offline: bool = False,
    seed: int = 0,
) -> Model:
    """Load a model.

    name: a name of `list_models`, a hub id (`org/repo`, or `org/repo@revision`), or a path of a file or folder.
    weights: a local file with weights for the named architecture, or "random" for meaningless ones drawn from `seed`.
    activation: "quick_gelu" or "gelu", where neither a configuration beside the weights nor their name tells.
    precision: of the image tower: fp32, bf16, fp16 (on a GPU) or int8 (on a CPU).
    compiled: let `torch.compile` translate the image tower when it is first used, which takes a minute; not for int8.
    offline: use what is in the cache, never the network.
    """
    from usetta.models.precision import check_precision, prepare

    check_precision(precision)
    _check_device(device)
    model = _load(name, weights, activation, device, cache_dir, offline, seed)
    prepare(model, precision, compiled=compiled)
    return model


def _check_device(device: "str | torch.device | None") -> None:
    """Refuse a device that is not there, in words instead of torch's many lines."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip() or "torch does not say why").splitlines()[0]
        raise ModelError(f"there is no device '{device}' here: {reason}") from None


def _load(
    name: str,
    weights: str | Path | None,
    activation: Activation | None,
    device: "str | torch.device | None",
    cache_dir: Path | None,
    offline: bool,
    seed: int,
) -> Model:
    known = canonical_name(name)
    if known in _REGISTERED and weights is None:
        return _REGISTERED[known].load(device=device, cache_dir=cache_dir, offline=offline)
    if weights is not None:
        if known not in ARCHITECTURES:
            raise ModelError(
                f"weights need the name of an architecture, not '{name}': one of {', '.join(ARCHITECTURES)}"
            )
        if weights == "random":
            return _random(known, activation, seed).to(device)
        return _from_path(Path(weights).expanduser(), activation, architecture=known).to(device)
    if known is not None:
        return _from_table(known, activation, cache_dir, offline).to(device)
    path = Path(name).expanduser()
    if path.exists() or path.suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        return _from_path(path, activation).to(device)
    if _is_hub_id(name):
        return _from_hub(name, activation, cache_dir, offline).to(device)
    raise UnknownModelError(_unknown(name))


def _random(name: str, activation: Activation | None, seed: int) -> "CLIP":
    from usetta.models.random_weights import random_model

    warnings.warn(f"{name} has random weights: its answers mean nothing", stacklevel=4)
    config = ARCHITECTURES[name]
    return random_model(replace(config, activation=activation or config.activation), name=f"{name}-random", seed=seed)


def _from_path(path: Path, activation: Activation | None, architecture: str | None = None) -> "CLIP | Siglip":
    from usetta.models.checkpoints import load_checkpoint

    if path.is_dir():
        if architecture is None and _is_siglip(path / "config.json"):
            return _siglip(path, path.name)
        found = [path / file for file in _WEIGHT_FILES if (path / file).is_file()]
        if not found:
            raise ModelError(f"{path} holds no weights: none of {', '.join(_WEIGHT_FILES)}")
        path = found[0]
    return load_checkpoint(path, name=architecture or path.stem, architecture=architecture, activation=activation)


def _from_table(name: str, activation: Activation | None, cache_dir: Path | None, offline: bool) -> "CLIP":
    from usetta.models.checkpoints import load_checkpoint
    from usetta.models.hub import download, download_optional

    if name not in PUBLISHED:
        raise ModelError(f"no weights are known for {name}: use a file of weights (`--model FILE`)")
    model = PUBLISHED[name]
    path = download(model.repo, model.file, revision=model.revision, cache_dir=cache_dir, offline=offline)
    for file in _companions(model.file):
        download_optional(model.repo, file, revision=model.revision, cache_dir=cache_dir, offline=offline)
    return load_checkpoint(
        path,
        name=name,
        architecture=model.architecture,
        activation=activation or model.activation,
        published_as=model.repo,
    )


def _from_hub(name: str, activation: Activation | None, cache_dir: Path | None, offline: bool) -> "CLIP | Siglip":
    from usetta.models.checkpoints import load_checkpoint
    from usetta.models.hub import download_optional

    repo, _, revision = name.partition("@")

    def optional(file: str) -> Path | None:
        return download_optional(repo, file, revision=revision or None, cache_dir=cache_dir, offline=offline)

    config = optional("config.json")
    if config and _is_siglip(config):
        from usetta.models.adapters import SIGLIP_FILES

        for file in SIGLIP_FILES:
            optional(file)
        return _siglip(config.parent, name)
    for file in _WEIGHT_FILES:
        path = optional(file)
        if path:
            for companion in _companions(file):
                optional(companion)
            return load_checkpoint(path, name=name, activation=activation, published_as=repo)
    where = "the cache" if offline else "the hub"
    raise ModelError(f"{repo} has no weights in a supported file in {where}: none of {', '.join(_WEIGHT_FILES)}")


def _companions(file: str) -> tuple[str, ...]:
    """The files that say about weights what the weights cannot."""
    if file.startswith("open_clip"):
        return ("open_clip_config.json",)
    return ("config.json", "preprocessor_config.json", "tokenizer.json")


def _is_siglip(config: Path) -> bool:
    from usetta.models.sidecar import read_json

    return config.is_file() and str(read_json(config).get("model_type")).startswith("siglip")


def _siglip(folder: Path, name: str) -> "Siglip":
    from usetta.models.adapters import load_siglip

    return load_siglip(folder, name=name)


def _is_hub_id(name: str) -> bool:
    """Whether `name` can be `org/repo` or `org/repo@revision`, and is not a misspelt `ViT-B/16`."""
    families = {architecture.rsplit("-", 1)[0].lower() for architecture in ARCHITECTURES}
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name)) and name.split("/")[0].lower() not in families


def _unknown(name: str) -> str:
    names = [*_REGISTERED, *PUBLISHED]
    close = difflib.get_close_matches(_plain(name), [_plain(known) for known in names], n=1)
    hint = next((f"; did you mean '{known}'?" for known in names if close == [_plain(known)]), "")
    return f"unknown model '{name}'{hint or ' (known: ' + ', '.join(names) + ', a hub id or a file)'}"
