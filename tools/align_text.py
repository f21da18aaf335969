"""Train the text tower of the embedded model and write it as int8 parts.

CLIP's own text tower is in no package registry, so a compact one of the same kind (causal, pre-norm, quick GELU, CLIP's
byte-pair tokens, feature at the end-of-text token) is trained to speak ViT-B/16's joint space from cached features:

* Targets. Real ViT-B/32 text features of 20 000 names, carried into B/16 space by a linear map (Procrustes plus ridge)
  fitted on images that both image towers encoded and on the 80 COCO names that both text towers encoded. The map is
  then changed a little so that the mapped texts recognise labelled B/16 images (`refine_map`).
* Losses. Cosine (raw and around the mean text, since all texts share a large common part) and in-batch contrast with
  the targets' own similarities as soft labels, so that near-synonyms are not pushed apart; cross-entropy of labelled
  image features against the texts of up to 192 classes of one set, half of them neighbours in the label order, which
  for ImageNet are the hard ones. ImageNet's image features are B/32 ones, mapped like the texts, and so are trusted
  less than those texts: the tower is better than either where it lies between what both ask for.
* Words. A token starts from what the sentence encoder MiniLM says of its string, reduced to `RANK` numbers with a flag
  for the end of a word; training moves the tokens that occur by a difference that decays towards zero, so that the
  words it never sees stay comparable with those it does.
* Weights. What is written is the moving average of the weights over some 200 steps.
* Speed. All texts of a step share one template. The tower is causal, so the template's prefix is run once, and only
  the tokens behind it are run per name, packed without padding; the last block runs for the end token only. Blocks
  run in bfloat16, the last projection and the losses in float32.
* Prompt tuning. Its learning rates (5e-3 a step) assume embeddings of CLIP's size, some 0.02; this tower grows them to
  0.6. Layer norm does not see the size of the residual stream, so the files have all of it divided by `STREAM`.

A share of every class's images (and one ImageNet image a class) never trains: it measures accuracy and fits
`logit_scale`. `--hold-out` leaves whole sets and a tenth of the names out as well, which measures generalisation.
All printed numbers are those of the quantised files, read back. Nothing in the material is copied to the output but the
hashes of names and the mean text, by which the model notices names it may not know (`text_familiarity.py`).
"""

import argparse
import gzip
import json
import math
import random
import re
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from text_familiarity import familiarity_error, make_familiarity
from usetta.models.clip import quick_gelu
from usetta.models.embedded.familiarity import TrainedNames
from usetta.models.tokenizer import CLIPTokenizer, vocabulary

WIDTH, LAYERS, HEADS, CONTEXT, EMBED_DIM, RANK, VOCABULARY = 320, 5, 5, 32, 512, 96, 49408
NAMES_A_STEP, CLASSES_A_STEP, IMAGES_A_CLASS = 256, 192, 6
LEARNING_RATE, WARM_UP, AVERAGING = 1e-3, 100, 0.995
DEFAULT = "a photo of a {}."
TEMPLATES = (
    DEFAULT, "a {}.", "{}", "a photo of the {}.", "itap of a {}.", "art of the {}.", "a photo of the large {}.",
    "a photo of the small {}.", "a bad photo of the {}.", "a origami {}.", "a {} in a video game.",
    "a close-up photo of a {}.", "an image of a {}.", "a photo of many {}.", "there is a {}.",
)  # fmt: skip
SET_SHARES = {"imagenet": 0.45, "flowers": 0.15, "pets": 0.10, "caltech": 0.12, "dtd": 0.04, "cars": 0.14}
STREAM, STREAM_WRITERS = 32, (
    "token_embedding.basis", "positional_embedding",
    "out_proj.weight.scale", "out_proj.bias", "c_proj.weight.scale", "c_proj.bias",
)  # fmt: skip
Table = dict[str, dict[str, float]]
PART_LIMIT = 4_500_000


@dataclass
class ImageSet:
    """Labelled image features (n, 512); names by label, equal names share the first label; `test` never trains."""

    names: list[str]
    features: Tensor
    labels: Tensor
    test: Tensor

    def accuracy(self, texts: Tensor, rows: Tensor) -> float:
        """Percent of `rows` whose nearest class text (classes, 512) is right."""
        return 100 * (self.logits(texts, rows).argmax(1) == self.labels[rows]).float().mean().item()

    def logits(self, texts: Tensor, rows: Tensor) -> Tensor:
        """Cosines (rows, classes); a repeated name can only win under its first label."""
        first = {name: i for i, name in reversed(list(enumerate(self.names)))}
        repeated = torch.tensor([first[name] != i for i, name in enumerate(self.names)])
        return (self.features[rows] @ texts.T).masked_fill(repeated, -1.0)


@dataclass
class Material:
    """Targets by name (B/16 space), the names that count as classes of things, and the image sets."""

    targets: dict[str, Tensor]
    bank: set[str]
    sets: dict[str, ImageSet]


def fit_map(texts32: Tensor, texts16: Tensor, pairs: dict[str, Tensor]) -> Tensor:
    """The linear map (512, 512) from centred B/32 rows to centred B/16 rows: a rotation and a ridge correction."""
    sources = [(3.0, texts32, texts16)] + [(1.0, pairs[f"{s}_b32"], pairs[f"{s}_b16"]) for s in ("caltech", "pets")]
    A = torch.cat([weight * (a - a.mean(0)) for weight, a, _ in sources])
    B = torch.cat([weight * (b - b.mean(0)) for weight, _, b in sources])
    U, _, V = torch.linalg.svd(A.T @ B)
    rotation = U @ V
    return rotation + torch.linalg.solve(A.T @ A + 30.0 * torch.eye(len(A.T)), A.T @ (B - A @ rotation))


def refine_map(
    linear: Tensor, mean: Tensor, texts: dict[str, Tensor], sets: list[ImageSet], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Change the map (512, 512) and the mean text (512,) so that mapped texts recognise labelled B/16 images.

    `texts` are centred B/32 features by name. Few of them are classes of a set, so changes of all texts are penalised:
    without the penalty, classes that are not among the sets are recognised worse than before.
    """
    change, shift = torch.zeros_like(linear, requires_grad=True), torch.zeros_like(mean, requires_grad=True)
    optimizer = torch.optim.Adam([change, shift], lr=1e-4)
    everything = torch.stack(list(texts.values()))
    problems = []
    for images in sets:
        known = [i for i in sorted(set(images.labels.tolist())) if images.names[i] in texts]
        rows = (torch.isin(images.labels, torch.tensor(known)) & ~images.test).nonzero()[:, 0]
        answers = torch.searchsorted(torch.tensor(known), images.labels[rows])
        problems.append((images.features[rows], answers, torch.stack([texts[images.names[i]] for i in known])))
    for _ in range(80):
        loss = 30 * ((_some(everything, generator)[0] @ change) ** 2).sum(1).mean() + (shift**2).sum()
        for features, answers, classes in problems:
            x, y = _some(features, generator, answers)
            mapped = F.normalize(classes @ (linear + change) + mean + shift, dim=1)
            loss = loss + F.cross_entropy(60 * x @ mapped.T, y) / len(problems)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (linear + change).detach(), (mean + shift).detach()


def _some(rows: Tensor, generator: torch.Generator, *others: Tensor) -> list[Tensor]:
    """500 of the rows, drawn with replacement, and the same of other tensors."""
    chosen = torch.randint(len(rows), (500,), generator=generator)
    return [tensor[chosen] for tensor in (rows, *others)]


def load_material(
    directory: Path, imagenet_manifest: Path, hold_out: list[str], generator: torch.Generator
) -> Material:
    """Read the features, map what is B/32 to B/16, and choose the images that never train."""

    def read(name: str) -> dict[str, Tensor]:
        tensors = load_file(directory / f"{name}.safetensors")
        return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}

    names, label_names = (json.loads((directory / f).read_text()) for f in ("names.json", "labelled_names.json"))
    texts32, texts16, pairs, labelled = read("text_b32"), read("text_b16")["coco"], read("pairs"), read("labelled_b16")
    images32, images16 = (torch.cat([pairs[f"{s}_{t}"] for s in ("caltech", "pets")]) for t in ("b32", "b16"))
    sets = {}
    for key, by_label in label_names.items():
        class_names = [by_label[str(i)].replace("_", " ").lower() for i in range(len(by_label))]
        sets[key] = _image_set(class_names, labelled[f"{key}_features"], labelled[f"{key}_labels"].long(), generator)

    bank = set(names["bank"]) | set(names["coco"])
    mean_text = texts32["coco"].mean(0)
    centred: dict[str, list[Tensor]] = {}
    for source in ("vg", "bank"):
        for name, row in zip(names[source], texts32[source] - mean_text, strict=True):
            if name in bank or re.fullmatch(r"[a-z]+(?:['-][a-z]+)*", name):  # leaves out "cord/shoes" and the like
                centred.setdefault(name, []).append(row)
    by_name = {name: torch.stack(rows).mean(0) for name, rows in centred.items()}
    refining = [
        images for key, images in sets.items() if key in ("caltech", "pets", "flowers", "dtd") and key not in hold_out
    ]
    linear, mean16 = refine_map(fit_map(texts32["coco"], texts16, pairs), texts16.mean(0), by_name, refining, generator)
    targets = {
        name: F.normalize(F.normalize(torch.stack(rows) @ linear + mean16, dim=1).sum(0), dim=0)
        for name, rows in centred.items()
    }
    targets |= dict(zip(names["coco"], texts16, strict=True))

    shots = read("imagenet_b32")
    rows = torch.cat([shots["one_shot"], shots["two_shot"], shots["four_shot"]])
    labels = torch.cat([torch.arange(1000).repeat_interleave(n) for n in (1, 2, 4)])
    class_names = [item[2].replace("_", " ").lower() for item in json.loads(imagenet_manifest.read_text())["items"]]
    mapped = F.normalize((rows - images32.mean(0)) @ linear + images16.mean(0), dim=1)
    sets["imagenet"] = _image_set(class_names, mapped, labels)
    for name in class_names:  # the bank spells without hyphens
        if name not in targets and name.replace("-", " ") in targets:
            targets[name] = targets[name.replace("-", " ")]
            bank.add(name)
    return Material(targets, bank, sets)


def _image_set(
    names: list[str], features: Tensor, labels: Tensor, generator: torch.Generator | None = None
) -> ImageSet:
    """With a generator 15 % of each class are for testing; without, the first row of each class."""
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(names)):
        rows = (labels == label).nonzero()[:, 0]
        if generator is not None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        test[rows[: max(1, round(0.15 * len(rows)))]] = True
    return ImageSet(names, features, torch.tensor([names.index(name) for name in names])[labels], test)


def token_strings(merges: Path) -> tuple[list[str], list[bool]]:
    """The readable string of every token but the two special ones, and whether it ends a word."""
    lines = gzip.decompress(merges.read_bytes()).decode().rstrip("\n").split("\n")
    pairs = [(a, b) for a, _, b in (line.partition(" ") for line in lines if not line.startswith('"bpe_'))]
    tokens = list(vocabulary(pairs))[:-2]
    letters = tokens[:256]
    octets = sorted(range(256), key=lambda b: not (0x21 <= b < 0x7F or 0xA1 <= b < 0xAD or b >= 0xAE))
    to_byte = dict(zip(letters, octets, strict=True))
    bare = [token.removesuffix("</w>") for token in tokens]
    strings = [bytes(to_byte[letter] for letter in word).decode("utf-8", "replace") for word in bare]
    return strings, [token != word for token, word in zip(tokens, bare, strict=True)]


@torch.no_grad()
def lexical_codes(merges: Path, minilm: Path, generator: torch.Generator) -> Tensor:
    """Initial token codes (vocabulary, RANK): principal components of MiniLM's features of the token strings."""
    from transformers import AutoModel, AutoTokenizer

    encoder, pieces = AutoModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    strings, ends = token_strings(merges)
    order = sorted(range(len(strings)), key=lambda i: len(strings[i]))
    features = torch.empty(len(strings), encoder.config.hidden_size)
    for start in range(0, len(order), 512):
        rows = order[start : start + 512]
        batch = pieces([strings[i] for i in rows], padding=True, truncation=True, max_length=24, return_tensors="pt")
        mask = batch["attention_mask"][..., None].float()
        features[rows] = F.normalize((encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)
    features -= features.mean(0)
    axes = torch.linalg.eigh(features.T @ features)[1].flip(1)[:, : RANK - 1]
    codes = features @ axes
    flags = torch.tensor(ends).float()[:, None] * 2 - 1
    special = torch.randn(2, RANK, generator=generator)  # start and end of text
    return torch.cat([torch.cat([codes / codes.std(), flags], 1), special])


class Tower(nn.Module):
    """The text tower with OpenAI's parameter names; the token embedding is (codes + difference) @ basis."""

    def __init__(self, codes: Tensor, trained: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("slot", torch.zeros(len(codes), dtype=torch.long))
        self.slot[trained] = torch.arange(len(trained)) + 1  # slot 0: tokens that training never meets
        self.difference = nn.Parameter(torch.zeros(len(trained) + 1, RANK))
        self.basis = nn.Parameter(0.7 * RANK**-0.5 * torch.randn(RANK, WIDTH))
        self.positional_embedding = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(_block() for _ in range(LAYERS))
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH, EMBED_DIM))

    def all_codes(self) -> Tensor:
        """Codes (vocabulary, RANK) as trained."""
        return self.codes + self.difference[self.slot]

    def forward(self, prefix: list[int], suffixes: list[list[int]]) -> Tensor:
        """Unit features (n, EMBED_DIM) of the n texts `prefix + suffix`; each suffix closes with the end token."""
        n, P = len(suffixes), len(prefix)
        lengths = torch.tensor([len(suffix) for suffix in suffixes])
        L = int(lengths.max())
        real = torch.arange(L) < lengths[:, None]
        cells = real.flatten().nonzero()[:, 0]  # where the packed tokens stand in the grid (n, L)
        ids = torch.tensor(prefix + [token for suffix in suffixes for token in suffix])
        positions = torch.cat([torch.arange(P), P + cells % L])
        ends = P + lengths.cumsum(0) - 1
        causal, causal_prefix = (torch.ones(a, b, dtype=torch.bool).tril(b - a) for a, b in ((L, P + L), (P, P)))
        last_mask = torch.cat([torch.ones(n, P, dtype=torch.bool), real], 1)[:, None, None]

        def spread(rows: Tensor) -> Tensor:
            """Packed suffix rows as (n, heads, L, d)."""
            return rows.new_zeros(n * L, WIDTH).index_copy(0, cells, rows).view(n, L, HEADS, -1).transpose(1, 2)

        def heads(rows: Tensor) -> Tensor:
            """Prefix rows as (1, heads, P, d)."""
            return rows.view(1, P, HEADS, -1).transpose(1, 2)

        x = (self.codes[ids] + self.difference[self.slot[ids]]) @ self.basis + self.positional_embedding[positions]
        for block in self.transformer.resblocks:
            attention, y = block.attn, block.ln_1(x)
            k, v = F.linear(y, attention.in_proj_weight[WIDTH:], attention.in_proj_bias[WIDTH:]).split(WIDTH, 1)
            keys = torch.cat([heads(k[:P]).expand(n, -1, -1, -1), spread(k[P:])], 2)
            values = torch.cat([heads(v[:P]).expand(n, -1, -1, -1), spread(v[P:])], 2)
            last = block is self.transformer.resblocks[-1]
            q = F.linear(y[ends] if last else y, attention.in_proj_weight[:WIDTH], attention.in_proj_bias[:WIDTH])
            if last:
                x, mixed = x[ends], _attend(q.view(n, HEADS, 1, -1), keys, values, last_mask).reshape(n, WIDTH)
            else:
                first = _attend(heads(q[:P]), heads(k[:P]), heads(v[:P]), causal_prefix)
                rest = _attend(spread(q[P:]), keys, values, causal)
                rest = rest.transpose(1, 2).reshape(n * L, WIDTH)[cells]
                mixed = torch.cat([first.transpose(1, 2).reshape(P, WIDTH), rest])
            x = x + attention.out_proj(mixed)
            x = x + block.mlp.c_proj(quick_gelu(block.mlp.c_fc(block.ln_2(x))))
        with torch.autocast("cpu", enabled=False):  # 100 cosines in bfloat16 would be wrong by 0.1
            return F.normalize(self.ln_final(x.float()) @ self.text_projection, dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Plain attention: the backward pass of PyTorch's fused one takes eight times as long in bfloat16 here."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(~mask, -1e4), -1) @ v


def _block() -> nn.Module:
    """The parameters of one block, initialised as CLIP does."""
    block, residual = nn.Module(), WIDTH**-0.5 * (2 * LAYERS) ** -0.5
    block.ln_1, block.ln_2, block.attn, block.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Module(), nn.Module()
    block.attn.in_proj_weight = nn.Parameter(WIDTH**-0.5 * torch.randn(3 * WIDTH, WIDTH))
    block.attn.in_proj_bias = nn.Parameter(torch.zeros(3 * WIDTH))
    block.attn.out_proj = nn.Linear(WIDTH, WIDTH)
    block.mlp.c_fc, block.mlp.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    for layer, deviation in (
        (block.attn.out_proj, residual),
        (block.mlp.c_fc, (2 * WIDTH) ** -0.5),
        (block.mlp.c_proj, residual),
    ):
        nn.init.normal_(layer.weight, std=deviation)
        nn.init.zeros_(layer.bias)
    return block


class Prompts:
    """Token ids of names in templates, remembered."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prefixes: dict[str, list[int]] = {}
        self.suffixes: dict[tuple[str, str], list[int]] = {}

    def prefix(self, template: str) -> list[int]:
        """Start token and what stands before the name."""
        if template not in self.prefixes:
            self.prefixes[template] = [self.tokenizer.start, *self.tokenizer.encode(template.split("{}")[0])]
        return self.prefixes[template]

    def suffix(self, template: str, name: str) -> list[int]:
        """The name, what stands after it, and the end token."""
        if (template, name) not in self.suffixes:
            whole = [self.tokenizer.start, *self.tokenizer.encode(template.format(name)), self.tokenizer.end]
            self.suffixes[template, name] = whole[len(self.prefix(template)) :]
        return self.suffixes[template, name]

    @torch.no_grad()
    def features(self, tower: Tower, names: list[str], template: str = DEFAULT) -> Tensor:
        """Unit features (n, EMBED_DIM) of the names in one template."""
        prefix, suffixes = self.prefix(template), [self.suffix(template, name) for name in names]
        return torch.cat([tower(prefix, suffixes[i : i + 500]) for i in range(0, len(names), 500)])


@dataclass
class Split:
    """What trains: names of things, other words, and per set the labels whose texts and images train."""

    bank: list[str]
    words: list[str]
    labels: dict[str, list[int]]
    held_names: list[str]


def split_material(material: Material, hold_out: list[str], rng: random.Random) -> Split:
    """Everything trains, unless sets are held out: then none of their names, and a tenth of the others not either."""
    forbidden = {name for key in hold_out for name in material.sets[key].names}
    class_names = {name for images in material.sets.values() for name in images.names}
    free = [name for name in material.targets if name not in class_names]
    held = rng.sample(free, len(material.targets) // 10) if hold_out else []
    forbidden |= set(held)
    allowed = [name for name in material.targets if name not in forbidden]
    labels = {
        key: [i for i in sorted(set(images.labels.tolist())) if images.names[i] not in forbidden]
        for key, images in material.sets.items()
        if key not in hold_out
    }
    things = [name for name in allowed if name in material.bank]
    return Split(things, [name for name in allowed if name not in material.bank], labels, held)


def train(material: Material, split: Split, prompts: Prompts, codes: Tensor, steps: int, rng: random.Random) -> Tower:
    """Run `steps` steps of AdamW and return the moving average of the tower's weights."""
    texts = [*split.bank, *split.words]
    texts += [material.sets[key].names[i] for key, labels in split.labels.items() for i in labels]
    met = {token for name in texts for token in prompts.suffix(DEFAULT, name)}
    met |= {token for t in TEMPLATES for token in prompts.prefix(t) + prompts.suffix(t, texts[0])}
    tower = Tower(codes, torch.tensor(sorted(met)))
    mean = torch.stack([material.targets[name] for name in split.bank + split.words]).mean(0)
    centre = F.normalize(mean, dim=0)
    named = [(name, p) for name, p in tower.named_parameters() if name != "difference"]
    matrices = [p for name, p in named if p.ndim == 2 and name != "positional_embedding"]
    others = [p for name, p in named if p.ndim == 1 or name == "positional_embedding"]
    groups = [(matrices, 0.05), (others, 0.0), ([tower.difference], 0.1)]
    optimizer = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in groups], betas=(0.9, 0.98))
    averaged = AveragedModel(tower, multi_avg_fn=get_ema_multi_avg_fn(AVERAGING))
    rows_by_label = {
        key: {i: ((material.sets[key].labels == i) & ~material.sets[key].test).nonzero()[:, 0] for i in labels}
        for key, labels in split.labels.items()
    }
    shares = {key: share for key, share in SET_SHARES.items() if key in split.labels}
    started, running = time.monotonic(), {"cosine": 0.0, "contrast": 0.0, "images": 0.0}
    for step in range(steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        template = DEFAULT if rng.random() < 0.6 else rng.choice(TEMPLATES[1:])
        key = rng.choices(list(shares), list(shares.values()))[0]
        images, labels = material.sets[key], _choose_classes(split.labels[key], rng)
        things = NAMES_A_STEP * 2 // 5
        names = rng.sample(split.bank, things) + rng.sample(split.words, NAMES_A_STEP - things)
        classes = [images.names[i] for i in labels]
        with torch.autocast("cpu", torch.bfloat16):
            features = tower(prompts.prefix(template), [prompts.suffix(template, name) for name in names + classes])
        words, class_texts = features.split([len(names), len(classes)])

        target = torch.stack([material.targets[name] for name in names])
        known = [j for j, name in enumerate(classes) if name in material.targets]
        anchor = torch.stack([material.targets.get(name, centre) for name in classes])
        cosine = 1 - F.cosine_similarity(words - mean, target - mean).mean() + 2 * (1 - (words * target).sum(1).mean())
        cosine = cosine + 0.5 * (1 - (class_texts * anchor).sum(1).mean())
        if known:
            pull = 2.0 if key == "imagenet" else 0.5
            cosine = cosine + pull * (1 - F.cosine_similarity(class_texts[known] - mean, anchor[known] - mean).mean())
        alike, soft = 60 * words @ target.T, F.softmax(60 * target @ target.T, 1)
        contrast = sum(F.kl_div(F.log_softmax(s, 1), soft, reduction="batchmean") for s in (alike, alike.T)) / 2
        rows = [_choose_rows(rows_by_label[key][i]) for i in labels]
        x = images.features[torch.cat(rows)]
        noise = 1.0 if key == "imagenet" else 0.5
        x = F.normalize(x + noise * EMBED_DIM**-0.5 * torch.randn_like(x), dim=1)  # against learning few by heart
        y = torch.arange(len(labels)).repeat_interleave(torch.tensor([len(r) for r in rows]))
        recognition = F.cross_entropy(100 * x @ class_texts.T, y)

        optimizer.zero_grad()
        (cosine + contrast + (0.1 if key == "imagenet" else 0.5) * recognition).backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(tower)
        for name, value in zip(running, (cosine, contrast, recognition), strict=True):
            running[name] += (value.item() - running[name]) / min(step + 1, 50)
        if (step + 1) % 50 == 0:
            losses = "  ".join(f"{name} {value:.3f}" for name, value in running.items())
            print(f"step {step + 1:5d}/{steps}  {time.monotonic() - started:5.0f} s  {losses}", flush=True)
    assert isinstance(averaged.module, Tower)
    return averaged.module


def _choose_classes(labels: list[int], rng: random.Random) -> list[int]:
    """At most CLASSES_A_STEP labels: half of them in a row, the others from anywhere."""
    if len(labels) <= CLASSES_A_STEP:
        return labels
    start = rng.randrange(len(labels))
    turned = labels[start:] + labels[:start]
    half = CLASSES_A_STEP // 2
    return turned[:half] + rng.sample(turned[half:], CLASSES_A_STEP - half)


def _choose_rows(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows))[:IMAGES_A_CLASS]]


def quantise(tower: Tower) -> dict[str, Tensor]:
    """Matrices as int8 with one fp16 scale a row (`name` and `name.scale`), vectors and positions as fp16."""
    state = {name: p.detach() for name, p in tower.named_parameters() if name not in ("difference", "basis")}
    state |= {"token_embedding.codes": tower.all_codes().detach(), "token_embedding.basis": tower.basis.detach()}
    packed = {}
    for name, tensor in state.items():
        if tensor.ndim == 1 or name in ("positional_embedding", "token_embedding.basis"):
            packed[name] = tensor.half()
        else:
            scale = (tensor.abs().amax(1) / 127).clamp_min(1e-7).half()
            packed[name] = (tensor / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8)
            packed[f"{name}.scale"] = scale
    return packed


def shrink_stream(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide by STREAM whatever writes into the residual stream, kept as fp32; layer norm undoes it."""
    return {name: t.float() / STREAM if name.endswith(STREAM_WRITERS) else t for name, t in packed.items()}


def write_parts(packed: dict[str, Tensor], directory: Path) -> list[Path]:
    """Write `text-<i>.safetensors`, each below PART_LIMIT unless one matrix alone is not."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("text-*.safetensors"):
        old.unlink()
    parts: list[dict[str, Tensor]] = [{}]
    for name in sorted(name for name in packed if not name.endswith(".scale")):
        group = {key: packed[key] for key in (name, f"{name}.scale") if key in packed}
        size = sum(t.nbytes for t in [*group.values(), *parts[-1].values()])
        if parts[-1] and size > PART_LIMIT:
            parts.append({})
        parts[-1] |= group
    paths = [directory / f"text-{i}.safetensors" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path)
    return paths


def read_back(paths: list[Path]) -> Tower:
    """The tower as its quantised files have it."""
    packed = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    state = {
        name: tensor.float() * packed[f"{name}.scale"].float()[:, None] if f"{name}.scale" in packed else tensor.float()
        for name, tensor in packed.items()
        if not name.endswith(".scale")
    }
    tower = Tower(state.pop("token_embedding.codes"), torch.tensor([], dtype=torch.long))
    state["basis"] = state.pop("token_embedding.basis")
    tower.load_state_dict(state, strict=False)
    return tower.eval()


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error in percent."""
    confidence, guess = logits.softmax(1).max(1)
    gap = (guess == labels).float() - confidence
    which = (confidence * bins).long().clamp(max=bins - 1)
    return 100 * torch.zeros(bins).index_add(0, which, gap).abs().sum().item() / len(labels)


def report(tower: Tower, material: Material, split: Split, prompts: Prompts) -> tuple[float, Table]:
    """Fit `logit_scale` (least mean calibration error on unused images of trained sets); print and return checks."""
    rows, cosines, texts = {}, {}, {}
    for key, images in material.sets.items():
        rows[key] = (images.test if key in split.labels else torch.ones_like(images.test)).nonzero()[:, 0]
        texts[key] = prompts.features(tower, images.names)
        cosines[key] = images.logits(texts[key], rows[key])
    labels = {key: images.labels[rows[key]] for key, images in material.sets.items()}

    def error(key: str, scale: float) -> float:
        return calibration_error(scale * cosines[key], labels[key])

    scale = min(range(40, 161), key=lambda s: sum(error(key, s) for key in split.labels))
    print(f"set        images  right  other templates  ECE at 100  ECE at {scale:3d}  mapped text: names, it, tower")
    table: Table = {}
    for key, images in material.sets.items():
        varied = [prompts.features(tower, images.names, template) for template in TEMPLATES[3:7]]
        others = [images.accuracy(features, rows[key]) for features in varied]
        table[key] = {
            "right": images.accuracy(texts[key], rows[key]),
            "other_templates": sum(others) / len(others),
            "ece_100": error(key, 100),
            "ece": error(key, scale),
        }
        note = "" if key in split.labels else "   (held out)"
        with_text = [i for i in sorted(set(images.labels.tolist())) if images.names[i] in material.targets]
        if with_text:
            mapped = torch.stack([material.targets[images.names[i]] for i in with_text])
            known = torch.isin(labels[key], torch.tensor(with_text))
            x, y = images.features[rows[key]][known], torch.tensor(with_text)
            for name, candidates in (("mapped_text", mapped), ("tower_same_names", texts[key][with_text])):
                guess = y[(x @ candidates.T).argmax(1)]
                table[key][name] = 100 * (guess == labels[key][known]).float().mean().item()
            note = (
                f"  {len(with_text):18d}, {table[key]['mapped_text']:.1f}, {table[key]['tower_same_names']:.1f}{note}"
            )
        right, others_right, before, after = list(table[key].values())[:4]
        print(f"{key:10s} {len(rows[key]):8d} {right:6.1f} {others_right:16.1f} {before:11.1f} {after:11.1f}{note}")
    if split.held_names:
        target = torch.stack([material.targets[name] for name in split.held_names])
        found = prompts.features(tower, split.held_names)
        mean = torch.stack([material.targets[name] for name in split.bank + split.words]).mean(0)
        hit = ((found[:1000] @ target[:1000].T).argmax(1) == torch.arange(1000)).float().mean().item()
        centred = F.cosine_similarity(found - mean, target - mean).mean().item()
        table["held_names"] = {"top1_of_1000": 100 * hit, "cosine": (found * target).sum(1).mean().item()}
        table["held_names"]["centred_cosine"] = centred
        print(f"held-out names: right text nearest of 1000 {100 * hit:.1f} %, centred cosine {centred:.3f}")
    return float(scale), table


def strange_words(material: Material, merges: Path) -> list[str]:
    """A tenth of CLIP's tokens that are whole words, of those that never train."""
    strings, ends = token_strings(merges)
    names = set(material.targets) | {name for images in material.sets.values() for name in images.names}
    words = {text for text, end in zip(strings, ends, strict=True) if end and re.fullmatch("[a-z]{3,}", text)}
    return sorted(words - names)[::10]


def report_familiarity(
    familiarity: TrainedNames, tower: Tower, material: Material, split: Split, prompts: Prompts, table: Table
) -> None:
    """How well familiarity finds names that were held out and that the tower does not know.

    A name is known if of all held-out texts its own is the nearest; a class, if most of its images are recognised.
    """
    features = prompts.features(tower, split.held_names)
    target = torch.stack([material.targets[name] for name in split.held_names])
    known = (features @ target.T).argmax(1) == torch.arange(len(target))
    table["familiarity_names"] = familiarity_error(familiarity.distances(features), known, familiarity.least)
    distances, recalls = [], []
    for key in sorted(material.sets.keys() - split.labels.keys()):
        images = material.sets[key]
        texts = prompts.features(tower, images.names)
        answers = images.logits(texts, torch.arange(len(images.labels))).argmax(1)
        for label in sorted(set(images.labels.tolist())):
            distances.append(familiarity.distances(texts[label]))
            recalls.append((answers[images.labels == label] == label).float().mean())
    table["familiarity_classes"] = familiarity_error(
        torch.stack(distances), torch.stack(recalls) > 0.5, familiarity.least
    )
    for key in ("familiarity_names", "familiarity_classes"):
        print(key, {name: round(value, 3) for name, value in table[key].items()})


def write_config(options: argparse.Namespace, paths: list[Path], scale: float, table: Table) -> None:
    """Write `config.json`: what the loader needs, how the run was made, and its checks."""
    config = {
        "width": WIDTH, "layers": LAYERS, "heads": HEADS, "context_length": CONTEXT, "vocab_size": VOCABULARY,
        "embed_dim": EMBED_DIM, "activation": "quick_gelu", "logit_scale": scale, "template": DEFAULT,
        "parts": [path.name for path in paths], "seed": options.seed, "steps": options.steps,
        "threads": options.threads, "held_out": options.hold_out,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "checks": {key: {k: round(v, 3) for k, v in row.items()} for key, row in table.items()},
    }  # fmt: skip
    (options.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Train, quantise, check, write."""
    package = Path(__file__).resolve().parent.parent / "src" / "usetta" / "models"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--material", type=Path, required=True, help="folder of the cached features")
    parser.add_argument("--imagenet-manifest", type=Path, required=True,
                        help="read for ImageNet's class names in ILSVRC order, nothing else")  # fmt: skip
    parser.add_argument("--minilm", type=Path, required=True, help="folder of the MiniLM-L6 sentence encoder")
    parser.add_argument("--merges", type=Path, default=package / "clip_merges.txt.gz", help="CLIP's merges, gzipped")
    parser.add_argument("--codes", type=Path, help="keep MiniLM's token codes in this file between runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts and config.json")
    parser.add_argument("--hold-out", nargs="*", default=[], choices=list(SET_SHARES), help="sets to leave out")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="one thread a run is fastest on a busy machine")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    generator, rng = torch.Generator().manual_seed(options.seed), random.Random(options.seed)  # noqa: S311
    material = load_material(options.material, options.imagenet_manifest, options.hold_out, generator)
    split = split_material(material, options.hold_out, rng)
    prompts = Prompts(CLIPTokenizer.from_merges(options.merges))
    if options.codes and options.codes.exists():
        codes = load_file(options.codes)["codes"]
    else:
        codes = lexical_codes(options.merges, options.minilm, torch.Generator().manual_seed(options.seed))
        if options.codes:
            save_file({"codes": codes}, options.codes)
    print(f"{len(split.bank)} names of things, {len(split.words)} words, {len(split.held_names)} held out", flush=True)
    torch.manual_seed(options.seed)  # only here: loading MiniLM draws random numbers, a kept file of codes does not
    tower = train(material, split, prompts, codes, options.steps, rng)
    paths = write_parts(shrink_stream(quantise(tower)), options.out)
    scale, table = report(read_back(paths), material, split, prompts)
    classes_that_train = [material.sets[key].names[i] for key, labels in split.labels.items() for i in labels]
    names = split.bank + split.words
    mean = torch.stack([material.targets[name] for name in names]).mean(0)
    final = read_back(paths)
    trained = [*names, *classes_that_train]
    strange = prompts.features(final, strange_words(material, options.merges))
    familiarity = make_familiarity(trained, strange, mean, options.out)
    if split.held_names:
        report_familiarity(familiarity, final, material, split, prompts, table)
    write_config(options, paths, scale, table)
    print(f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB in {[path.name for path in paths]}")


if __name__ == "__main__":
    main()
