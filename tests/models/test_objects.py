"""Models that were loaded with open_clip or transformers. open_clip itself does not import with every torch build."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from conftest import make_image
from models import open_clip_like as like
from models.open_clip_like import InterpolationMode, Resize, evaluation
from usetta import Classifier, from_open_clip
from usetta.models import Model, ModelError, TextTower
from usetta.models.adapters import Siglip
from usetta.models.base import view_recipe
from usetta.models.clip import CLIP, TextTransformer
from usetta.models.objects import OwnText, as_model
from usetta.prompts import ClassPrompts

TEXTS = ["a photo of a cat.", "a photo of a red fox.", "a bird"]
PIXELS = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class BertText(nn.Module):
    """As open_clip's HFTextEncoder: a text tower of transformers with a projection."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        self.transformer = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes))
        self.proj = nn.Linear(32, like.SPACE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(input_ids=ids, attention_mask=(ids != 1).long()).last_hidden_state
        return self.proj(hidden[:, 0])


def made(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    if kind == "bert":
        return like.CustomTextCLIP(BertText()).eval(), like.HFTokenizer()
    if kind == "siglip":
        return like.CustomTextCLIP(like.TextTransformer(40, 64, nn.GELU, "last")).eval(), like.HFTokenizer()
    text = like.TextTransformer(77, 49408, like.QuickGELU if kind == "quick" else nn.GELU)
    return (like.CustomTextCLIP if kind == "custom" else like.CLIP)(text).eval(), like.SimpleTokenizer()


@pytest.mark.parametrize(
    ("kind", "tower"), [("quick", TextTransformer), ("custom", TextTransformer), ("siglip", OwnText), ("bert", OwnText)]
)
def test_open_clip_models_answer_as_their_own_code(kind: str, tower: type) -> None:
    given, tokenizer = made(kind)
    with torch.no_grad():
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
        expected_images = normalize(given.encode_image((PIXELS / 255 - mean) / std), dim=-1)
        expected_texts = normalize(given.encode_text(tokenizer(TEXTS)), dim=-1)
    model = as_model((given, evaluation(), tokenizer))
    assert isinstance(model, Model)
    assert isinstance(model.text, TextTower)
    assert isinstance(model.text, tower)
    assert (model.embed_dim, model.image_size, model.name) == (24, 32, f"open_clip {type(given).__name__}")
    assert model.logit_scale == pytest.approx(torch.tensor(4.0).exp().item())
    torch.testing.assert_close(model.encode_images(PIXELS), expected_images, atol=1e-6, rtol=0)
    ids = model.text.tokenize(TEXTS)
    torch.testing.assert_close(model.text.encode(model.text.embed(ids), ids), expected_texts, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="the text has .* tokens"):
        model.text.tokenize(["cat", "dog " * 90])


@pytest.mark.parametrize(
    ("positions", "tokenizer", "length"),
    [
        (77, like.HFTokenizer(), 40),  # more positions than tokens
        (40, like.HFTokenizer(), 40),  # other tokens
        (8, like.SimpleTokenizer(8), 8),  # the same tokens, but too few for the texts that are compared
    ],
)
def test_a_text_tower_that_only_looks_like_clips_runs_its_own_code(positions: int, tokenizer: Any, length: int) -> None:
    torch.manual_seed(1)
    given = like.CustomTextCLIP(like.TextTransformer(positions, 49408, like.QuickGELU)).eval()
    model = as_model((given, evaluation(), tokenizer))
    assert isinstance(model.text, OwnText)
    assert model.text.tokenize([]).shape == (0, length)
    ids = model.text.tokenize(["cat"])
    with torch.no_grad():
        expected = normalize(given.encode_text(tokenizer(["cat"])), dim=-1)
    torch.testing.assert_close(model.text.encode(model.text.embed(ids), ids), expected, atol=2e-5, rtol=0)


def test_a_text_tower_without_token_embeddings_is_refused() -> None:
    given, tokenizer = made("siglip")
    given.text.token_embedding = None
    with pytest.raises(ModelError, match="the text tower TextTransformer has no token embedding that a context could"):
        as_model((given, evaluation(), tokenizer))


def test_fingerprints_see_weights_and_settings() -> None:
    def fingerprint(change: Any = None) -> tuple[str, str]:
        given, tokenizer = made("siglip")
        if change:
            change(given)
        model: Any = as_model((given, evaluation(), tokenizer))
        return model.fingerprint, model.image_fingerprint

    def heads(given: Any) -> None:
        given.text.transformer.resblocks[0].attn.num_heads = 4
        given.text.transformer.resblocks[0].attn.head_dim = 8

    base = fingerprint()
    assert fingerprint() == base
    other, same_images = fingerprint(heads)
    assert other != base[0]
    assert same_images == base[1]
    assert fingerprint(lambda given: given.visual.head.bias.data.add_(1))[1] != base[1]


@pytest.mark.parametrize("kind", ["custom", "siglip", "bert"])
def test_contexts_can_be_learned_in_any_text_tower(kind: str) -> None:
    given, tokenizer = made(kind)
    prompts = ClassPrompts(as_model((given, evaluation(), tokenizer)).text, ["cat", "red fox"])
    gradient = torch.randn(1, 2, 24, generator=torch.Generator().manual_seed(0))
    pulled = prompts.pullback(gradient)[0]
    step = torch.randn(pulled.shape, generator=torch.Generator().manual_seed(1))
    moved = [prompts.encode((prompts.context + sign * 1e-3 * step)[None]) for sign in (1, -1)]
    slope = ((moved[0] - moved[1]) * gradient).sum() / 2e-3
    assert (pulled * step).sum().item() == pytest.approx(slope.item(), rel=0.02)
    assert not any(part._forward_hooks for part in given.modules())


def test_a_classifier_takes_them() -> None:
    given, tokenizer = made("siglip")
    classifier = Classifier(["cat", "fox"], (given, evaluation(), tokenizer), "use", views=8)
    probs = classifier(make_image(0)).probs
    assert probs.sum() == pytest.approx(1)
    assert 0.001 < probs[0] < 0.999


BICUBIC, BILINEAR = InterpolationMode("bicubic"), InterpolationMode("bilinear")


@pytest.mark.parametrize(
    ("preprocess", "expected"),
    [
        (evaluation(), ("shortest", "bicubic")),
        (evaluation(Resize((32, 32), BILINEAR), like.ToTensor()), ("squash", "bilinear")),
        (evaluation(like.ResizeKeepRatio((32, 32), BICUBIC), like.CenterCropOrPad()), ("longest", "bicubic")),
        (evaluation(like.RandomResizedCrop()), "the step RandomResizedCrop .* is not supported: give the one for eval"),
        (evaluation(Resize(36, BICUBIC)), "the preprocessing is not supported: Compose"),
        (evaluation(None, like.CenterCropOrPad(fill=9)), "margins of the colour 9 are not supported"),
        (None, "the step NoneType of the preprocessing is not supported"),
    ],
)
def test_preprocessing_of_open_clip(preprocess: object, expected: tuple[str, str] | str) -> None:
    given, tokenizer = made("siglip")
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            as_model((given, preprocess, tokenizer))
    else:
        model = as_model((given, preprocess, tokenizer))
        recipe = view_recipe(model, 2)
        assert (recipe.resize_mode, recipe.interpolation, recipe.size) == (*expected, 32)
        assert (model.mean, model.std) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (made("siglip")[0], r"an open_clip model is given as \(model, preprocess, tokenizer\)"),
        (nn.Linear(1, 1), "a model must be a name, a path, .*got a Linear"),
        ((), r"got \(\)"),
        ((1, 2), r"got \(int, int\)"),
    ],
)
def test_other_objects_are_refused(given: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_model(given)


# By name, with open_clip


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given, tokenizer = made("siglip")
    asked: list[object] = []

    def create(model_name: str, pretrained: str | None = None, **options: object) -> tuple[object, ...]:
        asked.append((model_name, pretrained, options))
        if model_name == "no":
            raise RuntimeError("Model config for no not found.")
        return given, None, evaluation()

    library: Any = ModuleType("open_clip")
    library.create_model_and_transforms = create
    library.get_tokenizer = lambda name: tokenizer
    library.list_pretrained_tags_by_model = lambda name: ["webli"]
    monkeypatch.setitem(sys.modules, "open_clip", library)
    model = from_open_clip("ViT-B-16-SigLIP2", "webli", device="cpu")
    assert model.name == "ViT-B-16-SigLIP2/webli"
    assert asked == [("ViT-B-16-SigLIP2", "webli", {})]
    assert model.encode_images(PIXELS).shape == (3, 24)
    with pytest.raises(
        ModelError, match=r"open_clip cannot load no with the weights x \(Model config for no not found"
    ):
        from_open_clip("no", "x")
    with pytest.raises(ModelError, match="ViT-B-16-SigLIP2 would have random weights: choose some of webli"):
        from_open_clip("ViT-B-16-SigLIP2")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ModelError, match=r"ViT-B-32 needs open_clip: pip install 'usetta\[open-clip\]'"):
        from_open_clip("ViT-B-32", "openai")


def test_the_real_open_clip() -> None:
    try:
        import open_clip
    except Exception as error:  # noqa: BLE001 - a torchvision that was built for another torch raises almost anything
        pytest.skip(f"open_clip does not import here ({str(error).splitlines()[0]})")
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", pretrained=None)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    ours = as_model((model, preprocess, tokenizer))
    assert isinstance(ours.text, TextTransformer)
    with torch.no_grad():
        expected = normalize(model.encode_text(tokenizer(TEXTS)), dim=-1)
    ids = ours.text.tokenize(TEXTS)
    torch.testing.assert_close(ours.text.encode(ours.text.embed(ids), ids), expected, atol=2e-5, rtol=0)


# transformers


def test_clip_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        projection_dim=24,
        text_config={**sizes, "hidden_act": "gelu", "eos_token_id": 49407},
        vision_config={**sizes, "image_size": 32, "patch_size": 8, "hidden_act": "gelu"},
    )
    torch.manual_seed(0)
    given = transformers.CLIPModel(config).eval()
    model = as_model(given)
    assert isinstance(model, CLIP)
    assert (model.config.activation, model.image_size, model.name) == ("gelu", 32, "CLIPModel")
    pixels = model.normalize(PIXELS)
    ids = model.text.tokenize(TEXTS)
    with torch.no_grad():
        both = given(input_ids=ids, pixel_values=pixels)
    torch.testing.assert_close(model.encode_images(PIXELS), both.image_embeds, atol=1e-6, rtol=0)
    texts = model.text.encode(model.text.embed(ids), ids)
    torch.testing.assert_close(texts, both.text_embeds, atol=1e-5, rtol=0)
    given.visual_projection.weight.data.zero_()  # the model has its own copy
    torch.testing.assert_close(model.encode_images(PIXELS), both.image_embeds, atol=1e-6, rtol=0)
    with pytest.raises(ModelError, match=r"is given as \(model, processor\), with a processor of images and texts"):
        as_model((given, object()))


def test_processor_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    merges = [("c", "a"), ("ca", "t</w>")]

    class Processor:
        """What `AutoProcessor` returns, which needs torchvision."""

        kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
        image_processor = kind(size={"shortest_edge": 32}, crop_size=32, image_mean=[0.1, 0.2, 0.3], resample=2)

    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    from usetta.models.tokenizer import vocabulary

    table = vocabulary(merges)
    processor: Any = Processor()
    processor.tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(table, merges, end_of_word_suffix="</w>"))
    )
    text = {**sizes, "vocab_size": len(table), "eos_token_id": len(table) - 1}
    given = transformers.CLIPModel(transformers.CLIPConfig(projection_dim=24, text_config=text, vision_config=vision))
    model = as_model((given, processor))
    assert model.mean == (0.1, 0.2, 0.3)
    recipe = view_recipe(model, 2)
    assert (recipe.resize_mode, recipe.interpolation) == ("shortest", "bilinear")
    assert model.text.tokenize(["cat"])[0, :3].tolist() == [514, 513, 515]
    processor.tokenizer = object()
    with pytest.raises(ModelError, match="the tokenizer of CLIPModel is not one of Hugging Face tokenizers"):
        as_model((given, processor))


def test_siglip_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipConfig(
        text_config={**sizes, "vocab_size": 70, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    given = transformers.SiglipModel(config).eval()

    class Tokenizer:
        """Letters as tokens, padded with 1."""

        def __call__(self, text: str, padding: str, max_length: int) -> dict[str, list[int]]:
            assert padding == "max_length"
            letters = [2 + ord(letter) % 60 for letter in text]
            return {"input_ids": letters + [1] * (max_length - len(letters))}

    settings = {
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5] * 3,
        "size": {"height": 32, "width": 32},
        "resample": 2,
    }
    processor = SimpleNamespace(tokenizer=Tokenizer(), image_processor=SimpleNamespace(to_dict=lambda: settings))
    model = as_model((given, processor))
    assert isinstance(model, Siglip)
    assert (model.mean, model.image_size, model.name) == ((0.5, 0.4, 0.6), 32, "SiglipModel")
    recipe = view_recipe(model, 2)
    assert (recipe.resize_mode, recipe.interpolation) == ("squash", "bilinear")
    ids = model.text.tokenize(["a red fox"])
    with torch.no_grad():
        both = given(input_ids=ids, pixel_values=model.normalize(PIXELS))
    torch.testing.assert_close(model.encode_images(PIXELS), both.image_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.text.encode(model.text.embed(ids), ids), both.text_embeds, atol=1e-5, rtol=0)
    with pytest.raises(ModelError, match=r"SiglipModel needs its tokenizer: give it as \(model, processor\)"):
        as_model(given)
