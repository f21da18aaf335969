"""From the shell to the first answer, for `benchmarks.speed`: processes from their start to their end, in seconds.

ViT-B/16 with random weights in a safetensors file, 100 classes, one JPEG. `usetta classify` sees ten views, about what
an image takes on average, in the precision that it chooses here. The plain side reads the same file with nothing but
PyTorch, safetensors and Pillow, and answers from one view in float32 with all texts padded to 77 tokens, as zero-shot
code does everywhere. The least that is possible counts neither imports nor texts: loading the weights and encoding ten
views, in a process that has imported everything. What a first run leaves behind is there: compiled modules, files in
the memory of the system, text features in the cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path

from usetta.timing import class_names, generated_jpeg, shortest_in_turns

VIEWS = 10


@cache
def start(rounds: int) -> dict[str, float]:
    """Seconds of the shortest of at most three runs of each."""
    from benchmarks.common import load
    from usetta.models.checkpoints import save_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = save_model(load(), folder)
        (folder / "image.jpg").write_bytes(generated_jpeg(0))
        (folder / "names.txt").write_text("\n".join(class_names(100)))
        image, names = str(folder / "image.jpg"), str(folder / "names.txt")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["USETTA_CACHE"] = str(folder / "cache")

        def process(*arguments: str) -> str:
            command = [sys.executable, "-m", *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout  # noqa: S603

        asked = [image, "--classes", f"@{names}", "--model", str(weights), "--views", str(VIEWS)]
        ways = {
            "first_answer": partial(process, "usetta", "classify", *asked),
            "plain": partial(process, "benchmarks.start", "plain", str(weights), image, names),
            "help": partial(process, "usetta", "--help"),
        }
        seconds = shortest_in_turns(list(ways.values()), min(rounds, 3))
        least = [float(process("benchmarks.start", "least", str(weights), image, names)) for _ in range(min(rounds, 3))]
    return {**dict(zip(ways, seconds, strict=True)), "least": min(least)}


def plain(weights: str, path: str, names: list[str]) -> None:
    """Zero-shot classification without this package, but for its modules of CLIP."""
    import torch
    from PIL import Image
    from safetensors.torch import load_file

    from usetta.models.clip import CLIP
    from usetta.models.config import ARCHITECTURES, OPENAI_MEAN, OPENAI_STD
    from usetta.models.layouts import to_own

    config = ARCHITECTURES["ViT-B-16"]
    with torch.device("meta"):
        keys = list(CLIP(config, name="").state_dict())
    model = CLIP.from_state(config, to_own(load_file(weights), keys, "openai"), name="")
    image = Image.open(path).convert("RGB")
    scale = 224 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    image = image.crop((left, top, left + 224, top + 224))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(224, 224, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    ids = model.text.tokenize([f"a photo of a {name}." for name in names])
    with torch.no_grad():
        features = torch.nn.functional.normalize(model.image_tower(((pixels - mean) / std)[None]), dim=-1)
        text = model.text.encode(model.text.embed(ids), ids)
    probs = (100 * features @ text.T).softmax(dim=-1)[0]
    print(names[int(probs.argmax())], float(probs.max()))


def least(weights: str, path: str) -> None:
    """Print the seconds of loading the weights and encoding ten views, after everything is imported."""
    from usetta.images import open_image
    from usetta.models import checkpoints as _checkpoints  # noqa: F401
    from usetta.models import load_model
    from usetta.models import precision as _precision  # noqa: F401
    from usetta.models.tokenizer import default_tokenizer
    from usetta.views import ViewRecipe, make_views

    default_tokenizer()
    pixels = make_views(open_image(path), "image", ViewRecipe(views=VIEWS))
    begin = time.perf_counter()
    load_model(weights).encode_images(pixels)
    print(time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("plain", "least"))
    parser.add_argument("weights")
    parser.add_argument("image")
    parser.add_argument("names", type=Path)
    options = parser.parse_args()
    if options.way == "plain":
        plain(options.weights, options.image, options.names.read_text().split("\n"))
    else:
        least(options.weights, options.image)


if __name__ == "__main__":
    main()
