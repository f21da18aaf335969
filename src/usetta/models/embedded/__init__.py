"""The embedded model: open vocabulary without a model hub.

Its image tower is OpenAI's CLIP ViT-B/16, fetched once from a package index (`image`); its text tower is a small one
that ships with this package (`text`). It is not CLIP: numbers made with it are not the paper's.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from usetta.models.base import ModelError
from usetta.models.clip import CLIP
from usetta.models.config import ARCHITECTURES, CLIPConfig, TextConfig
from usetta.models.embedded import image, text
from usetta.models.layouts import to_own

NAME = "embedded"


def pull(say: Callable[[str], object]) -> Path:
    """Fetch what does not ship with the package; afterwards the model needs no network."""
    return image.pull(say)


def is_cached() -> bool:
    """Whether `load` needs no network."""
    return image.weights_path().is_file()


def load(say: Callable[[str], object], offline: bool = False) -> CLIP:
    """The model, fetched first if it was never pulled."""
    if offline and not is_cached():
        raise ModelError("the embedded model was never fetched: run `usetta models pull embedded` with a network once")
    path = pull(say)
    described = text.read_config()
    config = CLIPConfig(
        embed_dim=512,
        vision=ARCHITECTURES["ViT-B-16"].vision,
        text=TextConfig(
            width=described["width"],
            layers=described["layers"],
            heads=described["heads"],
            context_length=described["context_length"],
        ),
        activation=described["activation"],
    )
    with torch.device("meta"):
        keys = list(CLIP(config, name=NAME).state_dict())
    image_keys = [key for key in keys if key.startswith("image_tower.")]
    text_keys = [key for key in keys if key.startswith("text_tower.")]
    try:
        state = to_own(load_file(path), image_keys, "transformers")
    except (SafetensorError, KeyError) as error:
        raise ModelError(f"{path} is damaged ({error}): remove it and run `usetta models pull embedded`") from None
    state |= to_own(text.read_state(), text_keys, "openai")
    return CLIP.from_state(config, state, name=NAME, logit_scale=described["logit_scale"])
