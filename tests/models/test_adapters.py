"""SigLIP through transformers, with a tiny random model and a tokenizer trained on the spot."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from conftest import make_image
from models.fake_hub import REPO, Hub
from usetta.models import Model, ModelError, TextTower, load_model
from usetta.models.adapters import Siglip
from usetta.models.base import view_recipe
from usetta.views import make_views

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

SENTENCE = "a photo of the cat dog bird house tree river small large red green blue stone bridge and street"


def save_siglip(folder: Path, resample: int) -> Path:
    """Model and image processor as a SigLIP repository on the hub has them, without a tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.SiglipConfig(
        text_config={**sizes, "vocab_size": 60, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    model = transformers.SiglipModel(config)
    with torch.no_grad():
        model.logit_scale.fill_(4.0)
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    processor = {
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5] * 3,
        "resample": resample,
        "size": {"height": 32, "width": 32},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a SigLIP repository on the hub has it."""
    folder = save_siglip(tmp_path_factory.mktemp("siglip"), resample=3)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE] * 20),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    transformers.SiglipTokenizer(str(folder / "spiece.model"), model_max_length=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a SigLIP 2 repository of a fixed size has it: SigLIP's classes, Gemma's tokenizer, bilinear."""
    folder = save_siglip(tmp_path_factory.mktemp("siglip2"), resample=2)
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([SENTENCE], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name[1:-1]}_token": name for name in special}
    config = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": False, "add_eos_token": True, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "right"}))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(("which", "interpolation"), [("saved", "bicubic"), ("saved_2", "bilinear")])
def test_images_and_texts_to_logits_as_transformers(
    request: pytest.FixtureRequest, which: str, interpolation: str
) -> None:
    folder: Path = request.getfixturevalue(which)
    model = load_model(str(folder))
    assert isinstance(model, Siglip)
    assert isinstance(model, Model)
    assert isinstance(model.text, TextTower)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.image_size, model.embed_dim, model.text.causal, model.text.context_length) == (32, 32, False, 16)
    assert model.mean == (0.5, 0.4, 0.6)
    assert (model.resize_mode, model.interpolation) == ("squash", interpolation)

    reference = transformers.SiglipModel.from_pretrained(folder).eval()
    # Since version 5 the class without a suffix needs torchvision.
    kind = getattr(transformers, "SiglipImageProcessorPil", None) or transformers.SiglipImageProcessor
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    photos, names = [make_image(seed, (90, 50)) for seed in range(3)], ["a photo of a cat.", "the small red bird!"]
    prepared = kind.from_pretrained(folder)(images=photos, return_tensors="pt")
    texts = tokenizer(names, padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        both = reference(input_ids=texts["input_ids"], pixel_values=prepared["pixel_values"])
        ids = model.text.tokenize(names)
        text_features = model.text.encode(model.text.embed(ids), ids)
    assert torch.equal(ids, texts["input_ids"])
    pixels = torch.cat([make_views(photo, "x", view_recipe(model, 1)) for photo in photos])
    images = model.encode_images(pixels)
    torch.testing.assert_close(images, normalize(both.image_embeds, dim=-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(text_features, normalize(both.text_embeds, dim=-1), atol=1e-6, rtol=0)
    # The bias of the sigmoid is the same for all classes, so it does not change the softmax.
    logits = model.logit_scale * images @ text_features.T
    torch.testing.assert_close(logits + reference.logit_bias, both.logits_per_image, atol=1e-3, rtol=0)
    assert (text_features[0] @ text_features[1]).item() < 0.999
    assert (images[0] @ images[1]).item() < 0.9999


@pytest.mark.parametrize("which", ["saved", "saved_2"])
def test_texts_are_lower_cased_and_padded(request: pytest.FixtureRequest, which: str) -> None:
    text = load_model(str(request.getfixturevalue(which))).text
    ids = text.tokenize(["A Photo of a CAT", "a photo of a cat", "dog"])
    assert ids.shape == (3, 16)
    assert torch.equal(ids[0], ids[1])
    assert text.tokenize([]).shape == (0, 16)
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, the model takes at most 16: 'bridge bridge"):
        text.tokenize(["dog", "bridge " * 30])


def test_embeddings_take_gradients_and_cannot_be_trimmed(saved: Path) -> None:
    text = load_model(str(saved)).text
    ids = text.tokenize(["a photo of a cat"])
    embeddings = text.embed(ids).requires_grad_()
    text.encode(embeddings, ids)[0, 0].backward()
    assert embeddings.grad is not None
    assert embeddings.grad.abs().sum(-1).min() > 0, "every position counts, padding too"
    with pytest.raises(ValueError, match="a bidirectional text tower needs all 16 positions, got 7"):
        text.encode(embeddings[:, :7], ids[:, :7])


def test_fingerprint(saved: Path, folder: Path) -> None:
    before = load_model(str(saved)).fingerprint
    assert load_model(str(folder)).fingerprint == before
    (folder / "preprocessor_config.json").unlink()
    model = load_model(str(folder))
    assert model.mean == model.std == (0.5, 0.5, 0.5)
    assert model.fingerprint != before


@pytest.mark.parametrize(("which", "interpolation"), [("saved", "bicubic"), ("saved_2", "bilinear")])
def test_by_hub_id(request: pytest.FixtureRequest, which: str, interpolation: str, server: Hub, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(which)
    server.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = load_model(REPO, cache_dir=tmp_path)
    assert isinstance(model, Siglip)
    assert (model.name, model.image_size, model.mean) == (REPO, 32, (0.5, 0.4, 0.6))
    assert (model.resize_mode, model.interpolation) == ("squash", interpolation)
    assert model.fingerprint == load_model(str(folder)).fingerprint
    assert load_model(REPO, cache_dir=tmp_path, offline=True).fingerprint == model.fingerprint


def spoil(folder: Path, key: str, value: torch.Tensor | None) -> None:
    state = load_file(folder / "model.safetensors")
    if value is None:
        del state[key]
    else:
        state[key] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("text_model.head.bias", None, r"have missing keys: text_model\.head\.bias"),
        ("another.weight", torch.ones(1), r"have unexpected keys: another\.weight"),
        ("text_model.head.bias", torch.full((32,), float("nan")), "NaN or infinite values in .*head.bias"),
        ("text_model.head.bias", torch.ones(7), r"cannot be loaded|mismatched keys"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, key: str, value: torch.Tensor | None, message: str) -> None:
    spoil(folder, key, value)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_cut_off_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"the weights of .* cannot be loaded"):
        load_model(str(folder))


def test_missing_tokenizer(folder: Path) -> None:
    for path in [*folder.glob("spiece*"), *folder.glob("tokenizer*"), *folder.glob("special*")]:
        path.unlink()
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_model(str(folder))


def test_models_of_flexible_size_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "siglip2"}))
    with pytest.raises(ModelError, match=r"is of type siglip2; of the SigLIP family only fixed sizes"):
        load_model(str(folder))


def test_without_transformers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs transformers: pip install 'usetta\[hub\]'"):
        load_model(str(saved))


def test_without_sentencepiece(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError(
            "SiglipTokenizer requires the SentencePiece library but it was not found in your environment."
        )

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(ModelError, match=r"needs sentencepiece: pip install 'usetta\[hub\]'"):
        load_model(str(saved))


def test_torchvision_is_never_imported(saved: Path) -> None:
    load_model(str(saved))
    assert "torchvision" not in sys.modules
