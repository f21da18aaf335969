"""What other people's CLIP checkpoints look like: the names of their tensors.

Two layouts cover what is published: OpenAI's, which open_clip shares, and transformers'. For each of our keys a layout
lists the foreign tensors that make it up: one, or the three of queries, keys and values, which transformers keeps
apart. transformers also stores the projections transposed. Reading, writing, the list of missing and surplus keys and
the inference of the architecture all follow from that one table.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from usetta.models.base import ModelError

Layout = Literal["openai", "transformers"]
State = dict[str, Tensor]

LOGIT_SCALE = "logit_scale"
"""The logarithm of the scale, under the same key in both layouts."""

_BUFFERS = re.compile(
    r"(.*\.)?(position_ids|input_resolution|context_length|vocab_size|attn_mask|num_batches_tracked|logit_bias)"
)

_Rule = tuple[str, str | Callable[[re.Match[str]], str]]

_OPENAI: list[_Rule] = [
    (r"^image_tower\.blocks\.", "visual.transformer.resblocks."),
    (r"^text_tower\.blocks\.", "transformer.resblocks."),
    (r"^image_tower\.projection$", "visual.proj"),
    (r"^text_tower\.projection$", "text_projection"),
    (r"^image_tower\.patches\.", "visual.conv1."),
    (r"^image_tower\.stem\.(\d+)\.conv\.", lambda m: f"visual.conv{int(m[1]) + 1}."),
    (r"^image_tower\.stem\.(\d+)\.norm\.", lambda m: f"visual.bn{int(m[1]) + 1}."),
    (r"^image_tower\.stages\.(\d+)\.", lambda m: f"visual.layer{int(m[1]) + 1}."),
    (r"^image_tower\.pool\.out\.", "visual.attnpool.c_proj."),
    (r"^image_tower\.pool\.(query|key|value)\.", lambda m: f"visual.attnpool.{m[1][0]}_proj."),
    (r"^image_tower\.pool\.", "visual.attnpool."),
    (r"^image_tower\.", "visual."),
    (r"^text_tower\.", ""),
    (r"\.attention\.qkv\.", ".attn.in_proj_"),
    (r"\.attention\.out\.", ".attn.out_proj."),
    (r"\.mlp\.up\.", ".mlp.c_fc."),
    (r"\.mlp\.down\.", ".mlp.c_proj."),
    (r"\.shortcut\.conv\.", ".downsample.0."),
    (r"\.shortcut\.norm\.", ".downsample.1."),
    (r"\.reduce\.conv\.", ".conv1."),
    (r"\.reduce\.norm\.", ".bn1."),
    (r"\.spatial\.conv\.", ".conv2."),
    (r"\.spatial\.norm\.", ".bn2."),
    (r"\.expand\.conv\.", ".conv3."),
    (r"\.expand\.norm\.", ".bn3."),
]

_TRANSFORMERS: list[_Rule] = [
    (r"^image_tower\.blocks\.", "vision_model.encoder.layers."),
    (r"^text_tower\.blocks\.", "text_model.encoder.layers."),
    (r"^image_tower\.projection$", "visual_projection.weight"),
    (r"^text_tower\.projection$", "text_projection.weight"),
    (r"^image_tower\.patches\.", "vision_model.embeddings.patch_embedding."),
    (r"^image_tower\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^image_tower\.ln_post\.", "vision_model.post_layernorm."),
    (r"^text_tower\.ln_final\.", "text_model.final_layer_norm."),
    (r"^image_tower\.", "vision_model.embeddings."),
    (r"^text_tower\.", "text_model.embeddings."),
    (r"positional_embedding$", "position_embedding.weight"),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attention\.(qkv|out)\.", r".self_attn.\1_proj."),
    (r"\.mlp\.up\.", ".mlp.fc1."),
    (r"\.mlp\.down\.", ".mlp.fc2."),
]

_RULES: dict[Layout, list[_Rule]] = {"openai": _OPENAI, "transformers": _TRANSFORMERS}


def foreign_names(key: str, layout: Layout) -> list[str]:
    """The tensors that, stacked along their first dimension, are our tensor `key`."""
    name = key
    for pattern, replacement in _RULES[layout]:
        name = re.sub(pattern, replacement, name)
    if ".qkv_proj." in name:
        return [name.replace(".qkv_proj.", f".{part}_proj.") for part in "qkv"]
    return [name]


def _transposed(key: str, layout: Layout) -> bool:
    return layout == "transformers" and key.endswith(".projection")


def detect(state: Mapping[str, Tensor], source: str) -> Layout:
    """Which layout a state dict has; `source` names it in the error if none."""
    if any(key.startswith("visual.trunk.") for key in state):
        raise ModelError(
            f"{source} contains an open_clip model with a timm image encoder (keys visual.trunk.*), which is not "
            "supported as a file: use usetta.from_open_clip or the id of its hub repository; for SigLIP also the "
            "transformers weights, such as google/siglip-base-patch16-224"
        )
    if any(key.startswith("vision_model.") for key in state) and any(key.startswith("text_model.") for key in state):
        return "transformers"
    if any(key.startswith("visual.") for key in state) and "token_embedding.weight" in state:
        return "openai"
    first_keys = ", ".join(sorted(state)[:3]) or "nothing"
    raise ModelError(
        f"{source} is not a CLIP model in OpenAI, open_clip or transformers layout: expected keys such as "
        f"visual.conv1.weight or vision_model.embeddings.class_embedding, found {first_keys}"
    )


def own_shape(state: Mapping[str, Tensor], key: str, layout: Layout) -> tuple[int, ...] | None:
    """The shape that our tensor `key` would get from a foreign state dict; None if it is not there."""
    names = foreign_names(key, layout)
    if any(name not in state for name in names):
        return None
    first, *rest = state[names[0]].shape
    if len(names) > 1:
        first = sum(state[name].shape[0] for name in names)
    return (*rest, first) if _transposed(key, layout) else (first, *rest)


def missing_and_surplus(
    state: Mapping[str, Tensor], keys: Iterable[str], layout: Layout
) -> tuple[list[str], list[str]]:
    """Foreign keys that our `keys` need and `state` lacks, and those it has beyond them (known buffers aside)."""
    wanted = {name for key in keys for name in foreign_names(key, layout)} | {LOGIT_SCALE}
    surplus = [key for key in state if key not in wanted and not _BUFFERS.fullmatch(key)]
    return sorted(wanted - set(state)), sorted(surplus)


def to_own(state: Mapping[str, Tensor], keys: Iterable[str], layout: Layout) -> State:
    """Our `keys`, as contiguous float32, from a foreign state dict that has them all."""
    own = {}
    for key in keys:
        parts = [state[name].float() for name in foreign_names(key, layout)]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        own[key] = (tensor.T if _transposed(key, layout) else tensor).contiguous()
    return own


def to_foreign(own: Mapping[str, Tensor], layout: Layout) -> State:
    """The reverse of `to_own`."""
    foreign = {}
    for key, tensor in own.items():
        names = foreign_names(key, layout)
        parts = (tensor.T if _transposed(key, layout) else tensor).chunk(len(names))
        foreign.update({name: part.contiguous() for name, part in zip(names, parts, strict=True)})
    return foreign
