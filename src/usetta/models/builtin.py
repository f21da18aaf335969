"""The two names that are not a place on the hub: `embedded`, and `auto`, which chooses.

`auto` is CLIP ViT-B/16 if its weights are in the cache or can be downloaded, and the embedded model otherwise. Since
the two answer differently, the choice is always told: through the logger `usetta`, and by the name of the model.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from usetta.models.base import Model, ModelError
from usetta.models.registry import PUBLISHED, Registered, canonical_name, load_model, register

if TYPE_CHECKING:
    import torch

PREFERRED = "ViT-B-16"
_log = logging.getLogger("usetta")


def pull_model(name: str, say: Callable[[str], object]) -> Path | str:
    """Fetch what a model needs into the cache, so that it loads offline afterwards; returns where that is."""
    known = canonical_name(name)
    if known == "embedded":
        from usetta.models import embedded

        return embedded.pull(say)
    say(f"downloading {known or name}")
    load_model(known or name)
    return "the hub's cache"


def _load_embedded(*, device: "str | torch.device | None", cache_dir: Path | None, offline: bool) -> Model:
    from usetta.models import embedded

    return embedded.load(_log.warning, offline).to(device)


def _embedded_is_cached() -> bool:
    from usetta.models import embedded

    return embedded.is_cached()


def _load_auto(*, device: "str | torch.device | None", cache_dir: Path | None, offline: bool) -> Model:
    try:
        return load_model(PREFERRED, device=device, cache_dir=cache_dir, offline=offline)
    except ModelError as error:
        _log.warning("CLIP %s is neither in the cache nor to be downloaded: using the embedded model", PREFERRED)
        _log.info("%s", error)
        return load_model("embedded", device=device, cache_dir=cache_dir, offline=offline)


def _auto_is_cached() -> bool:
    from usetta.models import hub

    return hub.is_cached(PUBLISHED[PREFERRED].repo, PUBLISHED[PREFERRED].file) or _embedded_is_cached()


register(
    "auto",
    Registered(
        _load_auto, PREFERRED, "hub or package index", "ViT-B-16 if it can be had, else embedded", _auto_is_cached
    ),
)
register(
    "embedded",
    Registered(
        _load_embedded,
        PREFERRED,
        "package index",
        "CLIP's ViT-B/16 image tower with a small text tower; needs no hub",
        _embedded_is_cached,
    ),
)
