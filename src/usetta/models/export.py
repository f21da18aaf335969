"""A model for other programs: its image tower as ONNX, and the text features of a class list.

The graph takes pixels (n, 3, S, S), float32 in 0..1 and not normalised, and returns unit-length features (n, D), for
any number n. Together with the text features that is enough for zero-shot and for self-ensembling (SE) without PyTorch.
Methods that tune the prompt need the text tower, which is not exported.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from usetta.models.base import Model, ModelError
from usetta.models.towers import TwoTowers, normalised

OPSET = 18
IMAGE_FILE, TEXT_FILE, CONFIG_FILE = "image.onnx", "text.npy", "model.json"


class _ImageGraph(nn.Module):
    """What is exported: normalisation, the tower, and features of unit length."""

    def __init__(self, model: TwoTowers) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixels: Tensor) -> Tensor:
        features = self._model.image_features(normalised(pixels, self._model.mean, self._model.std))
        return normalize(features, dim=-1)


def export_model(model: Model, classes: Sequence[str], text_features: Tensor, folder: Path) -> None:
    """Write the image tower of a float32 model on the CPU, text features (C, D), and what belongs to them."""
    if not isinstance(model, TwoTowers):
        raise ModelError(f"{model.name} has its own image encoder, which cannot be exported")
    folder.mkdir(parents=True, exist_ok=True)
    size = model.image_size
    with warnings.catch_warnings():  # about constants in the graph, which are meant to be constant
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _ImageGraph(model).eval(),
            (torch.rand(2, 3, size, size),),
            str(folder / IMAGE_FILE),
            input_names=["pixels"],
            output_names=["features"],
            dynamic_axes={"pixels": {0: "n"}, "features": {0: "n"}},
            opset_version=OPSET,
            dynamo=False,  # the newer exporter needs another package, and gives the same graph
        )
    np.save(folder / TEXT_FILE, text_features.detach().float().numpy())
    described = {
        "model": model.name,
        "classes": list(classes),
        "image_size": size,
        "resize_mode": model.resize_mode,
        "interpolation": model.interpolation,
        "logit_scale": model.logit_scale,
        "opset": OPSET,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
