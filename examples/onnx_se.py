"""Self-ensembling (SE) without usetta and PyTorch: python onnx_se.py FOLDER IMAGE, FOLDER by `usetta export-model`."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def predict(folder, views):
    """The probabilities (C,) of views (N, 3, S, S), float32 in 0..1, the weak one first."""
    config, text = json.loads(Path(folder, "model.json").read_text("utf-8")), np.load(Path(folder, "text.npy"))
    (features,) = onnxruntime.InferenceSession(Path(folder, "image.onnx")).run(None, {"pixels": views})
    logits = config["logit_scale"] * features @ text.T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    entropies = -(probs * np.log(np.maximum(probs, 1e-30))).sum(axis=1)
    chosen = 1 + np.argsort(entropies[1:], kind="stable")[: max(1, (len(views) - 1) // 10)]
    beta = 0.5 + 0.4 * ((entropies[1:] > entropies[0]).mean() - 0.5)
    return beta * probs[0] + (1 - beta) * probs[chosen].mean(axis=0)


def make_views(image, size, squash=False, count=64, seed=0):
    """The image as a square and random crops of it; usetta's own views follow torchvision to the bit."""
    whole = image.resize((size, size)) if squash else ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    rng, views = np.random.default_rng(seed), [whole]
    for _ in range(count - 1):
        side = np.sqrt(image.width * image.height * rng.uniform(0.08, 1)) * np.exp(rng.uniform(-0.14, 0.14, 2))
        width, height = np.minimum(side, image.size).astype(int).clip(1)
        left, top = rng.integers(image.width - width + 1), rng.integers(image.height - height + 1)
        views.append(image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + width, top + height)))
    return np.stack(views).transpose(0, 3, 1, 2).astype(np.float32) / 255


if __name__ == "__main__":
    known = json.loads(Path(sys.argv[1], "model.json").read_text("utf-8"))
    image, squash = Image.open(sys.argv[2]).convert("RGB"), known["resize_mode"] == "squash"
    answer = predict(sys.argv[1], make_views(image, known["image_size"], squash))
    print(f"{known['classes'][answer.argmax()]}  {answer.max():.1%}")
