"""Files of tensors: what is no such file is an error, and nothing in a TorchScript archive is run."""

import errno
import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from usetta.models.base import ModelError
from usetta.models.state_files import is_torchscript, read_state, read_torchscript, scripted_activation

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.narrow = nn.Parameter(torch.randn(3, 5).half().T)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)) * self.scale
        return y * torch.sigmoid(1.702 * y)


class Outer(nn.Module):
    def __init__(self, activation: str = "quick_gelu") -> None:
        super().__init__()
        self.blocks = nn.Sequential(Inner(), nn.GELU() if activation == "gelu" else nn.Identity())
        self.count = nn.Buffer(torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def archive(path: Path, activation: str = "quick_gelu", *, traced: bool = True) -> Outer:
    model = Outer(activation).eval()
    image = torch.randn(1, 3, 8, 8)
    scripted = torch.jit.trace(model, image) if traced else torch.jit.script(model)
    torch.jit.save(scripted, path)
    return model


@pytest.mark.parametrize("traced", [True, False])
def test_state_is_what_the_module_has(tmp_path: Path, traced: bool) -> None:
    path = tmp_path / "model.pt"
    model = archive(path, traced=traced)
    assert is_torchscript(path)
    state = read_state(path)
    expected = model.state_dict()
    assert set(state) == set(expected)
    for key, tensor in state.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key])


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_activation_is_read_from_the_code(tmp_path: Path, activation: str) -> None:
    archive(tmp_path / "model.pt", activation)
    assert scripted_activation(tmp_path / "model.pt") == activation


def test_other_files_are_not_taken_for_archives(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("hello")
    assert not is_torchscript(tmp_path / "plain.pt")
    assert not is_torchscript(tmp_path / "text.pt")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, ("__import__('pathlib').Path('owned').touch()",))


def repack(path: Path, changes: dict[str, bytes | None]) -> None:
    """Rewrite entries of the archive by the end of their name; None removes them."""
    with zipfile.ZipFile(path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in entries.items():
            new = next((value for end, value in changes.items() if name.endswith(end)), data)
            if new is not None:
                target.writestr(name, new)


def test_code_in_the_pickle_is_refused_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    archive(path)
    repack(path, {"data.pkl": pickle.dumps(Evil())})
    with pytest.raises(ModelError, match=r"model\.pt .*builtins\.eval is not allowed"):
        read_torchscript(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("module", ["os", "torch", "torch._utils", "torch.jit._pickle", "collections"])
def test_only_tensors_can_be_named(tmp_path: Path, module: str) -> None:
    path = tmp_path / "model.pt"
    archive(path)
    repack(path, {"data.pkl": f"c{module}\nload\n.".encode()})
    with pytest.raises(ModelError, match=rf"{module}\.load is not allowed"):
        read_torchscript(path)


@pytest.mark.parametrize(
    "change", [{"data/0": None}, {"data/0": b"1234"}, {"data.pkl": b"\x80\x02"}, {"data.pkl": b""}]
)
def test_damage_is_an_error(tmp_path: Path, change: dict[str, bytes | None]) -> None:
    path = tmp_path / "model.pt"
    archive(path)
    repack(path, change)
    with pytest.raises(ModelError, match=r"model\.pt is a damaged TorchScript archive, or contains more than tensors"):
        read_torchscript(path)


def test_an_archive_without_its_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    archive(path)
    repack(path, {"data.pkl": None})
    with pytest.raises(ModelError, match=r"it has 0 entries named data\.pkl"):
        read_torchscript(path)


def test_cut_off_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    archive(path)
    buffer = io.BytesIO(path.read_bytes())
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(ModelError, match=r"model\.pt"):
        read_state(path)


def test_attributes_with_a_type_are_passed_over(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = torch.jit.Attribute({"cat": 1}, dict[str, int])
            self.sizes = torch.jit.Attribute([3, 4], list[int])
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.names["cat"] * self.sizes[0]

    model = Named()
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as saved:
        assert b"restore_type_tag" in saved.read("model/data.pkl")
    state = read_state(tmp_path / "model.pt")
    assert list(state) == ["weight"]
    assert torch.equal(state["weight"], model.weight)


def test_only_storages_are_loaded_from_elsewhere(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, given: object) -> object:
            return ("code", None, "0", "cpu", 1) if given == "outside" else None

    path, pickled = tmp_path / "model.pt", io.BytesIO()
    archive(path)
    Pickler(pickled).dump(["outside"])
    repack(path, {"data.pkl": pickled.getvalue()})
    with pytest.raises(ModelError, match="unknown storage 'code'"):
        read_torchscript(path)


# Files that are no weights


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"\x00" * 100, "is damaged, perhaps cut off while downloading"),
        ("a.safetensors", b"", "is damaged, perhaps cut off while downloading"),
        ("a.pt", b"", r"a\.pt is damaged or not a weights file"),
        ("a.pt", b"hello", r"a\.pt is damaged or not a weights file"),
        ("a.pt", b"PK\x03\x04 cut off", r"a\.pt is damaged or not a weights file"),
        ("a.pt", b"<!DOCTYPE html><html></html>", r"a\.pt cannot be loaded safely"),
        ("a.pt", b"garbage" * 100, r"a\.pt cannot be loaded safely"),
        ("a.bin", pickle.dumps({"x": print}, protocol=2), r"a\.bin cannot be loaded safely"),
        ("a.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "is a git-lfs pointer, not the weights"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_state(tmp_path / name)


def test_no_state_dict(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelError, match=r"list\.pt contains no state dict"):
        read_state(tmp_path / "list.pt")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_state(tmp_path / "no.pt")
    with pytest.raises(ModelError, match="is not a file"):
        read_state(tmp_path)


def test_a_file_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").write_bytes(b"weights")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read what others may not
    with pytest.raises(ModelError, match=r"a\.pt cannot be read \(Permission denied\)$"):
        read_state(tmp_path / "a.pt")
