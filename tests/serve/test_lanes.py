"""Pictures that wait together are spread over cores, and nothing but the time they take depends on it."""

import threading

import pytest
import torch

from usetta.models.clip import CLIP
from usetta.serve.lanes import Lanes


class Watched:
    """Tells in which thread, and with how many cores, views were encoded."""

    def __init__(self, model: CLIP) -> None:
        self._model = model
        self.calls: list[tuple[int, bool, int]] = []

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        own = threading.current_thread() is threading.main_thread()
        self.calls.append((len(pixels), own, torch.get_num_threads()))
        return self._model.encode_images(pixels)


@pytest.mark.parametrize(("views", "lanes", "parts"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (8, 1, [8])])
def test_views_are_dealt_to_lanes(tiny_model: CLIP, views: int, lanes: int, parts: list[int]) -> None:
    pixels = torch.randint(0, 256, (views, 3, 32, 32), dtype=torch.uint8)
    torch.set_num_threads(2)
    model, found = Watched(tiny_model), Lanes(lanes)
    features = found.encode(model.encode_images, pixels, spread=True)
    found.close()
    assert sorted((count for count, _, _ in model.calls), reverse=True) == parts
    if lanes > 1:
        assert {call[1:] for call in model.calls} == {(False, 1)}
    assert torch.allclose(features, tiny_model.encode_images(pixels), atol=1e-5)
    assert torch.get_num_threads() == 2
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [2]
    torch.set_num_threads(1)


def test_a_picture_that_is_alone_has_all_cores(tiny_model: CLIP) -> None:
    model, lanes = Watched(tiny_model), Lanes(2)
    lanes.encode(model.encode_images, torch.zeros(5, 3, 32, 32, dtype=torch.uint8), spread=False)
    assert model.calls == [(5, True, torch.get_num_threads())]
