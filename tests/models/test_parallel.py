"""Chunks of a batch have cores of their own, and nothing but the time they take depends on it."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.tiny import TINY_VIT, disturbed
from usetta.models.parallel import agrees_on_one_core, map_chunks, map_on_cores, observe_chunks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Watched:
    """Doubles rows, and records their number, whether in the main thread, and with how many cores."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, int]] = []

    def __call__(self, rows: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        own = threading.current_thread() is threading.main_thread()
        self.calls.append((len(rows), own, torch.get_num_threads()))
        return 2 * rows

    @property
    def sizes(self) -> list[int]:
        return sorted((call[0] for call in self.calls), reverse=True)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(64, [4] * 10 + [3] * 8), (12, [4, 4, 4]), (13, [3, 2, 2, 2, 2, 2]), (7, [3, 2, 2]), (2, [1, 1])],
)
def test_chunks_are_spread_evenly_over_cores(rows: int, sizes: list[int]) -> None:
    work, numbers, observed = Watched(), torch.arange(float(rows))[:, None], list[int]()
    with observe_chunks(observed.append):
        assert torch.equal(map_chunks(work, numbers, CPU), 2 * numbers)
    assert work.sizes == sorted(observed, reverse=True) == sizes
    map_chunks(work, numbers, CPU)
    assert len(observed) == len(sizes)  # not after the end
    assert {call[1:] for call in work.calls} == {(False, 1)}


def test_two_images_share_many_cores() -> None:
    torch.set_num_threads(4)
    work = Watched()
    map_chunks(work, torch.zeros(2, 1), CPU)
    assert work.calls == [(1, False, 2)] * 2


@pytest.mark.parametrize("rows", [0, 1])
def test_one_image_has_all_cores(rows: int) -> None:
    work = Watched()
    assert map_chunks(work, torch.ones(rows, 5), CPU).shape == (rows, 5)
    assert work.calls == [(rows, True, 3)]


def test_a_single_core_and_a_gpu_take_one_chunk_after_another() -> None:
    torch.set_num_threads(1)
    on_cpu, on_gpu = Watched(), Watched()
    map_chunks(on_cpu, torch.zeros(9, 1), CPU)
    torch.set_num_threads(3)
    map_chunks(on_gpu, torch.zeros(100, 1), torch.device("cuda"))
    assert on_cpu.calls == [(4, True, 1), (4, True, 1), (1, True, 1)]
    assert on_gpu.calls == [(64, True, 3), (36, True, 3)]


def test_all_cores_are_given_back() -> None:
    def fail(rows: Tensor) -> Tensor:
        raise ValueError(f"cannot do {len(rows)}")

    with pytest.raises(ValueError, match="cannot do 2"):
        map_chunks(fail, torch.zeros(6, 1), CPU)
    assert torch.get_num_threads() == 3
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [3]


def test_features_are_the_same() -> None:
    model = disturbed(TINY_VIT)
    pixels = torch.rand(10, 3, 32, 32)
    several = model.encode_images(pixels)
    torch.set_num_threads(1)
    torch.testing.assert_close(several, model.encode_images(pixels), atol=1e-5, rtol=0)
    assert not several.requires_grad


def test_an_error_is_about_all_pixels_not_about_a_chunk() -> None:
    with pytest.raises(ValueError, match=r"got \(10, 3, 16, 16\)"):
        disturbed(TINY_VIT).encode_images(torch.rand(10, 3, 16, 16))
    with pytest.raises(ValueError, match=r"got \(10, 3, 16, 16\)"):
        disturbed(TINY_VIT).hidden_states(torch.rand(10, 3, 16, 16))


def attend(rows: Tensor) -> Tensor:
    """Attention of one query to many keys, whose sum PyTorch splits by the number of threads."""
    keys = torch.randn(12, 197, 64, generator=torch.Generator().manual_seed(0)).expand(len(rows), -1, -1, -1)
    queries = rows.flatten(1)[:, : 12 * 64].view(-1, 12, 1, 64) / 255
    return scaled_dot_product_attention(queries, keys, keys).flatten(1)


def test_on_a_core_of_its_own_an_image_keeps_every_bit() -> None:
    torch.set_num_threads(2)
    views = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    alone = [map_chunks(attend, views[:n], CPU) for n in (1, 2, 5)]
    together: dict[int, tuple[Tensor, int]] = {}

    def work(n: int) -> None:
        together[n] = map_chunks(attend, views[:n], CPU), torch.get_num_threads()

    map_on_cores(work, (1, 2, 5))
    assert [together[n][1] for n in (1, 2, 5)] == [1, 1, 1]
    assert all(torch.equal(together[n][0], expected) for n, expected in zip((1, 2, 5), alone, strict=True))
    assert torch.get_num_threads() == 2


def test_whether_cores_agree_is_found_out() -> None:
    assert agrees_on_one_core(lambda views: map_chunks(attend, views[:1], CPU), 32)
    assert not agrees_on_one_core(lambda views: views[:, 0, 0, 0] + torch.get_num_threads(), 32)
