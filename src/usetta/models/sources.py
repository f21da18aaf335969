"""Where weights come from that have no entry of their own: files, folders, hub repositories, OpenAI's downloads.

Nothing heavy is imported before something is loaded: names of models are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from usetta.models.base import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from usetta.models.adapters import Siglip
    from usetta.models.clip import CLIP
    from usetta.models.config import Activation
    from usetta.models.objects import OpenClip
    from usetta.models.registry import LoadOptions

OPEN_CLIP_FILE = "open_clip_model.safetensors"

# Best first: repositories of timm hold their image tower alone as model.safetensors beside open_clip's file.
_WEIGHT_FILES = (OPEN_CLIP_FILE, "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")


def from_path(path: Path, activation: Activation | None, architecture: str | None = None) -> CLIP | Siglip | OpenClip:
    """The model in a file of weights, or in a folder as a hub repository has it."""
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


def from_hub(name: str, options: LoadOptions) -> CLIP | Siglip | OpenClip:
    """The model in the hub repository `org/repo`, or `org/repo@revision`."""
    from usetta.models.checkpoints import load_checkpoint
    from usetta.models.hub import download_optional

    repo, _, revision = name.partition("@")
    if revision and options.revision not in (None, revision):
        raise ModelError(f"the name says revision {revision} of {repo}, revision= says {options.revision}")
    revision = revision or options.revision or ""

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
            for companion in companions(file):
                optional(companion)
            return load_checkpoint(path, name=name, activation=options.activation, published_as=repo)
    where = "the cache" if options.offline else "the hub"
    raise ModelError(f"{repo} has no supported weights in {where}, that is none of {', '.join(_WEIGHT_FILES)}")


def companions(file: str) -> tuple[str, ...]:
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


def _by_open_clip(location: str, name: str, cache_dir: Path | None = None) -> OpenClip:
    from usetta.models.objects import from_open_clip

    model = from_open_clip(location, device="cpu", precision="fp32", cache_dir=cache_dir)
    model.name = name
    return model


def _siglip(folder: Path, name: str) -> Siglip:
    from usetta.models.adapters import load_siglip

    return load_siglip(folder, name=name)


def from_openai(architecture: str, options: LoadOptions) -> CLIP | None:
    """The model from the file that OpenAI's package has downloaded, if there is one."""
    from usetta.models import openai_files
    from usetta.models.checkpoints import load_checkpoint

    path = openai_files.find(architecture)
    if path is None:
        return None
    openai_files.verify(path, architecture)
    model = load_checkpoint(
        path, name=architecture, architecture=architecture, activation=options.activation, published_as="openai"
    )
    return model.to(options.device)
