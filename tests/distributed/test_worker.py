"""What an engine of workers does without a cluster: the worker itself, and what is refused."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distributed.workers import Numbers, Squares
from usetta.distributed import EngineError, RayEngine
from usetta.distributed.ray import _Actor, _room
from usetta.distributed.same_model import SameModel
from usetta.models import ModelError
from usetta.models.clip import CLIP


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_worker_finishes_what_it_has_when_there_is_no_more() -> None:
    """The hand wants to see the next piece first, and would wait for it for ever."""
    actor: _Actor[Numbers, list[int]] = _Actor()
    actor.start(Squares, 1)
    assert torch.get_num_threads() == 1
    assert actor.do(Numbers((3,))) == [9]
    with ThreadPoolExecutor(2) as callers:
        works = [Numbers((n, n + 7)) for n in range(200)]
        assert list(callers.map(actor.do, works)) == [[n**2, (n + 7) ** 2] for n in range(200)]


@pytest.mark.usefixtures("threads")
def test_an_error_of_the_hand_reaches_whoever_asked_and_the_worker_goes_on() -> None:
    actor: _Actor[Numbers, list[int]] = _Actor()
    actor.start(lambda: Squares(wrong=5), 1)
    with pytest.raises(ValueError, match="5 cannot be squared"):
        actor.do(Numbers((5,)))
    assert actor.do(Numbers((6,))) == [36]


def test_workers_that_fit_on_a_cluster() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    assert _room(nodes, RayEngine()) == 20
    assert _room(nodes, RayEngine(cpus=3)) == 1 + 5
    assert _room(nodes, RayEngine(cpus=0.5)) == 40
    assert _room(nodes, RayEngine(gpus=1)) == 2
    assert _room(nodes, RayEngine(gpus=0.25)) == 8
    assert _room(nodes, RayEngine(cpus=4, gpus=0.25)) == 4
    assert _room(nodes, RayEngine(gpus=4)) == 1  # it may be on its way


@pytest.mark.parametrize("options", [{"workers": 0}, {"cpus": 0}, {"gpus": -1}])
def test_impossible_workers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="worker"):
        RayEngine(**options)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'usetta\[cluster\]'"):
        list(RayEngine().run(Squares, [Numbers((1,))]))


def test_where_there_is_nothing_to_do_no_cluster_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert list(RayEngine().run(Squares, [])) == []


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("127.0.0.1:1", EngineError, "nobody answers at 127.0.0.1:1 .*ray start --head"),
        ("somewhere", ValueError, "an address is 'auto', 'local' or host:port, not 'somewhere'"),
    ],
)
def test_an_address_where_nobody_is(address: str, error: type[Exception], message: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(error, match=message):
        list(RayEngine(address).run(Squares, [Numbers((1,))]))


def test_a_worker_with_another_model_is_refused(tiny_model: CLIP) -> None:
    assert SameModel(lambda: tiny_model, tiny_model.fingerprint)() is tiny_model
    with pytest.raises(ModelError, match=r"has loaded another model \(tiny-random\) than the one that is wanted"):
        SameModel(lambda: tiny_model, "another")()
