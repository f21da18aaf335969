"""Hub models that are not CLIP, through their own code in transformers (extra `usetta[hub]`).

SigLIP, and those SigLIP 2 models that share its classes, meet the same protocol. Their text tower is bidirectional, was
trained on texts padded to full length, and reads the last position, padding or not: so nothing may be trimmed or shared
(`causal` is False, and `encode` refuses shorter sequences). Their sigmoid bias moves all classes alike, so a softmax
over classes does not see it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import normalize

from usetta.models.base import ModelError
from usetta.models.sidecar import Preprocessing, processor_settings, read_json, read_processor
from usetta.models.towers import TwoTowers

SIGLIP_FILES = (
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.model",
)
"""What a SigLIP repository may hold beside config.json, as far as it is needed here."""

_HALF = (0.5, 0.5, 0.5)


def require_all_positions(embeddings: Tensor, context_length: int) -> None:
    """Refuse trimmed embeddings (n, L, width), which a text tower that is not causal cannot encode."""
    if embeddings.shape[1] != context_length:
        raise ValueError(
            f"a bidirectional text tower needs all {context_length} positions, got {embeddings.shape[1]}: "
            "trimming and sharing of prefixes are for causal towers"
        )


class SiglipText(nn.Module):
    """SigLIP's text tower as a `base.TextTower`: bidirectional, read at the last position."""

    causal = False

    def __init__(self, tower: Any, tokenizer: Any) -> None:
        super().__init__()
        self.width: int = tower.config.hidden_size
        self.context_length: int = tower.config.max_position_embeddings
        self.tower = tower
        self.tokenizer = tokenizer

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids (n, context_length), padded as in training. A text that does not fit raises ValueError."""
        rows = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            lowered = text.lower()  # SigLIP 2 was trained so too, but its published tokenizer leaves it to the caller
            padded = self.tokenizer(lowered, padding="max_length", max_length=self.context_length)["input_ids"]
            if len(padded) > self.context_length:
                raise ValueError(
                    f"the text has {len(padded)} tokens, the model takes at most {self.context_length}: {text!r}"
                )
            row.copy_(torch.tensor(padded))
        return rows

    def embed(self, ids: Tensor) -> Tensor:
        """Word embeddings (n, L, width) of `ids` (n, L), without positions, on the tower's device."""
        table = self.tower.embeddings.token_embedding
        embeddings: Tensor = table(ids.to(table.weight.device))
        return embeddings

    def encode(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """Unit-length features (n, D) of `embeddings` (n, context_length, width), differentiable in them."""
        require_all_positions(embeddings, self.context_length)
        hidden = self.tower.encoder(inputs_embeds=self.tower.embeddings(inputs_embeds=embeddings)).last_hidden_state
        pooled = self.tower.head(self.tower.final_layer_norm(hidden[:, -1]))
        return normalize(pooled.to(torch.promote_types(pooled.dtype, torch.float32)), dim=-1)


class Siglip(TwoTowers):
    """transformers' `SiglipModel` as a `base.Model`."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str, preprocessing: Preprocessing) -> None:
        super().__init__(
            name=name,
            embed_dim=model.text_model.head.out_features,  # older versions of transformers have no projection_size
            image_size=model.config.vision_config.image_size,
            mean=preprocessing.get("mean", _HALF),
            std=preprocessing.get("std", _HALF),
            logit_scale=math.exp(model.logit_scale.item()),
        )
        self.resize_mode = preprocessing.get("resize_mode", "squash")
        self.interpolation = preprocessing.get("interpolation", "bicubic")
        self.config = model.config
        self.image_tower = model.vision_model
        self.text_tower = SiglipText(model.text_model, tokenizer)
        self.freeze()

    @property
    def text(self) -> SiglipText:
        """The text tower."""
        return self.text_tower

    def image_features(self, pixels: Tensor) -> Tensor:
        """Features (n, D), of any length, of normalised pixels (n, 3, S, S)."""
        features: Tensor = self.image_tower(pixel_values=pixels).pooler_output
        return features

    def describe(self) -> str:
        """The configuration and the pixel statistics."""
        return f"{self.config.to_json_string()} {self.mean} {self.std}"


def load_siglip(folder: Path, *, name: str) -> Siglip:
    """The SigLIP model that transformers saved in `folder`, in float32."""
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "siglip":
        raise ModelError(f"{name} is of type {kind}; of the SigLIP family only fixed sizes (type siglip) are supported")
    try:
        from transformers import AutoTokenizer, SiglipModel
    except ImportError as error:
        raise ModelError(f"{name} needs transformers: pip install 'usetta[hub]' ({error})") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise ModelError(f"the tokenizer of {name} needs sentencepiece: pip install 'usetta[hub]' ({error})") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{name} has no usable tokenizer in {folder} ({_first_line(error)})") from None
    try:
        loaded: Any = SiglipModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of {name} in {folder} cannot be loaded ({_first_line(error)})") from None
    model, info = loaded
    _check(model, info, name)
    source = folder / "preprocessor_config.json"
    preprocessing = processor_settings(source, read_processor(folder), model.config.vision_config.image_size)
    return Siglip(model.float(), tokenizer, name=name, preprocessing=preprocessing)


def _check(model: Any, info: dict[str, Any], name: str) -> None:
    """Refuse what transformers only warns of: it fills what a file lacks with random numbers."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            keys = sorted(map(str, info[problem]))
            raise ModelError(f"the weights of {name} have {problem.replace('_', ' ')}: {', '.join(keys[:3])}")
    infinite = [key for key, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    if infinite:
        raise ModelError(f"the weights of {name} have NaN or infinite values in {', '.join(infinite[:3])}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
