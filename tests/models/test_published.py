"""What the hub holds, in miniature: weights and configurations laid out as the published ones, served by a local hub.

The names and settings were looked up in open_clip's table of weights and in the repositories' own configurations.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import save
from torch import nn

from models import open_clip_like as like
from models.fake_hub import Hub
from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models import ModelError, load_model
from usetta.models.checkpoints import export_state
from usetta.models.clip import CLIP

OPENAI = (0.48145466, 0.4578275, 0.40821073)
HALF = (0.5, 0.5, 0.5)


@dataclass
class Published:
    """A repository in open_clip's layout, and what must be loaded from it."""

    repo: str
    activation: str
    quick_gelu: bool | None = None
    """As the configuration says; None where it is silent."""
    preprocess: dict[str, Any] = field(default_factory=dict)
    resnet: bool = False
    mean: tuple[float, float, float] = OPENAI
    resize_mode: str = "shortest"

    def files(self) -> dict[str, bytes]:
        config = replace(TINY_RESNET if self.resnet else TINY_VIT, activation=self.activation)  # type: ignore[arg-type]
        vision = (
            {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "patch_size": None, "head_width": 64}
            if self.resnet
            else {"image_size": 32, "layers": 3, "width": 48, "patch_size": 8, "head_width": 16}
        )
        model = {
            "embed_dim": 24,
            "vision_cfg": vision,
            "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
        }
        if self.quick_gelu is not None:
            model["quick_gelu"] = self.quick_gelu
        described = {"model_cfg": model, "preprocess_cfg": self.preprocess}
        return {
            "open_clip_config.json": json.dumps(described).encode(),
            "open_clip_model.safetensors": save(export_state(disturbed(config), "openai")),
        }


CLIP_WAY = {"mean": OPENAI, "std": (0.26862954, 0.26130258, 0.27577711), "interpolation": "bicubic"}
PUBLISHED = [
    Published("timm/vit_base_patch16_clip_224.openai", "quick_gelu", True, {**CLIP_WAY, "resize_mode": "shortest"}),
    Published("timm/resnet50_clip.openai", "quick_gelu", True, {**CLIP_WAY, "resize_mode": "shortest"}, resnet=True),
    Published("timm/resnet50_clip.openai", "quick_gelu", None, CLIP_WAY, resnet=True),  # an older revision
    Published("timm/vit_base_patch32_clip_224.laion400m_e32", "quick_gelu", True, CLIP_WAY),
    Published("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "gelu", None, {"mean": OPENAI, "std": CLIP_WAY["std"]}),
    Published("laion/CLIP-ViT-L-14-laion2B-s32B-b82K", "gelu", None, {"mean": HALF, "std": HALF}, mean=HALF),
    Published("laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K", "gelu", None, CLIP_WAY),
    Published("apple/DFN2B-CLIP-ViT-B-16", "quick_gelu", None, CLIP_WAY),
    Published(
        "apple/DFN5B-CLIP-ViT-H-14", "quick_gelu", True, {**CLIP_WAY, "resize_mode": "squash"}, resize_mode="squash"
    ),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.repo} {one.quick_gelu}")
def test_models_in_open_clip_s_layout(published: Published, server: Hub, tmp_path: Path) -> None:
    server.repo, server.files = published.repo, published.files()
    model = load_model(published.repo, cache_dir=tmp_path)
    assert isinstance(model, CLIP)
    assert model.config.activation == published.activation
    assert (model.mean, model.resize_mode, model.interpolation) == (published.mean, published.resize_mode, "bicubic")
    assert model.image_size == (64 if published.resnet else 32)


def test_laion_s_quick_gelu_is_not_taken_for_gelu_without_configuration(server: Hub, tmp_path: Path) -> None:
    published = PUBLISHED[3]
    server.repo, server.files = published.repo, published.files()
    config = json.loads(server.files["open_clip_config.json"])
    config["model_cfg"]["quick_gelu"] = False
    server.files["open_clip_config.json"] = json.dumps(config).encode()
    with pytest.raises(ModelError, match=r"says gelu, the name .*laion400m_e32 says quick_gelu; pass activation="):
        load_model(published.repo, cache_dir=tmp_path)


def test_openai_s_own_repositories_are_in_the_layout_of_transformers(server: Hub, tmp_path: Path) -> None:
    part = {"num_attention_heads": 3, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    config = {"model_type": "clip", "vision_config": {**part, "image_size": 32}, "text_config": {**part}}
    config["text_config"]["num_attention_heads"] = 2  # type: ignore[index]
    processor = {"crop_size": 32, "do_center_crop": True, "image_mean": OPENAI, "resample": 3, "size": 32}
    server.repo = "openai/clip-vit-base-patch16"
    server.files = {
        "config.json": json.dumps(config).encode(),
        "preprocessor_config.json": json.dumps(processor).encode(),
        "model.safetensors": save(export_state(disturbed(TINY_VIT), "transformers")),
    }
    model = load_model(server.repo, cache_dir=tmp_path)
    assert isinstance(model, CLIP)
    assert (model.config.activation, model.resize_mode, model.mean) == ("quick_gelu", "shortest", OPENAI)


@pytest.mark.parametrize(
    ("repo", "vision", "text"),
    [
        ("timm/ViT-B-16-SigLIP2", {"timm_model_name": "vit_base_patch16_siglip_224"}, {"no_causal_mask": True}),
        ("timm/MobileCLIP2-S0-OpenCLIP", {"timm_model_name": "fastvit_mci0"}, {"context_length": 77}),
        ("laion/CLIP-ViT-B-32-roberta-base-laion2B-s12B-b32k", {"patch_size": 32}, {"hf_model_name": "roberta-base"}),
    ],
)
def test_other_towers_need_open_clip(
    repo: str, vision: dict, text: dict, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repo = repo
    config = {"model_cfg": {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    server.files = {"open_clip_config.json": json.dumps(config).encode(), "open_clip_model.safetensors": b"not read"}
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ModelError, match=rf"hf-hub:{repo} needs open_clip: pip install 'usetta\[open-clip\]'"):
        load_model(repo, cache_dir=tmp_path)
    with pytest.raises(ModelError, match=r"loaded by open_clip, which takes the newest revision: leave out '@main'"):
        load_model(f"{repo}@main", cache_dir=tmp_path)
    with pytest.raises(ModelError, match="to keep it from the network, set HF_HUB_OFFLINE=1"):
        load_model(repo, cache_dir=tmp_path, offline=True)


def test_other_towers_by_open_clip(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = like.CustomTextCLIP(like.TextTransformer(40, 64, nn.GELU, "last")).eval()
    asked: list[str] = []
    library: Any = ModuleType("open_clip")
    library.create_model_and_transforms = lambda name, **_: (asked.append(name), (given, None, like.evaluation()))[1]
    library.get_tokenizer = lambda name: like.HFTokenizer()
    monkeypatch.setitem(sys.modules, "open_clip", library)
    config = {"model_cfg": {"vision_cfg": {"timm_model_name": "vit"}, "text_cfg": {}, "custom_text": True}}
    server.repo, server.files = "timm/ViT-B-16-SigLIP2", {"open_clip_config.json": json.dumps(config).encode()}
    by_id = load_model(server.repo, cache_dir=tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "open_clip_config.json").write_text(json.dumps(config))
    by_folder = load_model(str(tmp_path / "folder"))
    assert asked == [f"hf-hub:{server.repo}", f"local-dir:{tmp_path / 'folder'}"]
    assert (by_id.name, by_folder.name) == (server.repo, "folder")
    assert by_id.fingerprint == by_folder.fingerprint
