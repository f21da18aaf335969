"""Methods that tune alike share the work, and no answer depends on whether they do."""

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.test_recipe import episode
from models.tiny import TINY_VIT, disturbed
from usetta import methods, shared_steps
from usetta.methods.losses import dispersion, orthogonality
from usetta.methods.recipe import Result, run
from usetta.prompts import ClassPrompts
from usetta.shared_steps import SharedSteps

NAMES = ["cat", "red-breasted merganser", "kite (bird of prey)", "hen", "great grey owl", "axolotl", "newt", "747-400"]
ALL = (
    *("tpt", "c-tpt", "o-tpt", "r-tpt", "rce:skip=false", "use:skip=false", "use", "tpt+se", "tpt:steps=3", "rlcf"),
    *("c-tpt:steps=2", "tpt:active=4", "c-tpt:active=4"),
)


@pytest.fixture
def prompts() -> ClassPrompts:
    return ClassPrompts(disturbed(TINY_VIT).text, NAMES)


def views() -> Tensor:
    return episode(24, 1, 0, 3, dim=24)[0]


def answer(prompts: ClassPrompts, method: str) -> Result:
    return run(methods.get(method), views(), prompts, 20.0)


def counted(prompts: ClassPrompts, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the text tower is asked for features or a pullback, by the kind of work."""
    calls: Counter[str] = Counter()
    template = type(prompts._templates[0])
    for kind in ("encode", "pullback"):
        whole = getattr(template, kind)

        def note(self: Any, grad: Tensor, kind: str = kind, whole: Any = whole) -> Tensor:
            calls[kind] += 1
            result: Tensor = whole(self, grad)
            return result

        monkeypatch.setattr(template, kind, note)
    return calls


def test_a_method_has_the_same_answer_to_the_last_bit_alone_and_beside_others(prompts: ClassPrompts) -> None:
    alone = {method: answer(prompts, method) for method in ALL}
    with prompts.steps.kept():
        for method in (*ALL, *reversed(ALL)):
            together = answer(prompts, method)
            for field in fields(Result):
                torch.testing.assert_close(
                    getattr(together, field.name), getattr(alone[method], field.name), rtol=0, atol=0, equal_nan=True
                )


def test_what_methods_have_in_common_is_computed_once(prompts: ClassPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(prompts, "c-tpt")
    answer(prompts, "o-tpt")  # the constants of the class list
    calls = counted(prompts, monkeypatch)
    with prompts.steps.kept():
        for method in ("tpt", "c-tpt", "o-tpt", "r-tpt", "use:skip=false"):
            answer(prompts, method)
        assert calls == {"pullback": 3, "encode": 5}, "three methods follow one gradient, to contexts of their own"
        for method in ("tpt+se", "r-tpt+se", "rce:skip=false"):
            answer(prompts, method)
        assert calls == {"pullback": 3, "encode": 5}, "the same tuning, another readout"
    answer(prompts, "tpt")
    assert calls == {"pullback": 4, "encode": 6}, "nothing is kept for the next images"


def test_more_steps_begin_as_fewer(prompts: ClassPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(prompts, monkeypatch)
    with prompts.steps.kept():
        answer(prompts, "tpt:steps=3")
        before = calls.copy()
        answer(prompts, "tpt")
        answer(prompts, "tpt:steps=2")
    assert before["pullback"] == 1
    assert calls == before


def test_the_gradient_of_a_penalty_at_the_start_is_autograd_s(prompts: ClassPrompts) -> None:
    for penalty in (dispersion, orthogonality):
        context = prompts.context.clone().requires_grad_()
        (expected,) = torch.autograd.grad(penalty(prompts.encode(context[None])[0]), context)
        torch.testing.assert_close(prompts.gradient_of(penalty), expected, rtol=1e-4, atol=1e-7)
        assert prompts.gradient_of(penalty) is prompts.gradient_of(penalty)


def test_time_that_was_saved_is_counted() -> None:
    steps, one = SharedSteps(), torch.ones(3)
    calls = []

    def work() -> Tensor:
        calls.append(1)
        return one + len(calls)

    with steps.kept():
        first = steps.get(work, "work", [one, None])
        assert steps.seconds_saved == 0
        with steps.kept():
            again = steps.get(work, "work", [one.clone(), None])
        assert again is first
        assert steps.seconds_saved > 0
        for kind, inputs in (("other", [one, None]), ("work", [one + 1, None]), ("work", [one, one]), ("work", [one])):
            assert steps.get(work, kind, inputs) is not first
        assert steps.get(work, "work", [one, None]) is first, "also after an inner block"
    assert steps.get(work, "work", [one, None]) is not first
    assert len(calls) == 6


def test_memory_is_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_steps, "_BYTES", 3 * 4)
    steps = SharedSteps()
    numbers = [torch.tensor([float(i)]) for i in range(5)]
    with steps.kept():
        results = [steps.get(lambda number=number: number.clone(), "", [number]) for number in numbers]  # type: ignore[misc]
        kept = [steps.get(lambda number=number: number.clone(), "", [number]) for number in numbers[::-1]]  # type: ignore[misc]
    assert [a is b for a, b in zip(results, kept[::-1], strict=True)] == [False, False, True, True, True]
