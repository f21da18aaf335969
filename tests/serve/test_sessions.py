"""Methods for streams on a server: a session is a stream, whoever else asks, and what it keeps has bounds."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from serve.test_refusals import assert_refused
from usetta import Classifier
from usetta.models.clip import CLIP
from usetta.serve.sessions import SessionCache, SessionKey
from usetta.serve.settings import Limits, Settings

IMAGES = [png(seed) for seed in (0, 1, 2, 1, 3, 4)]
METHODS = [
    "tda",
    "dmn",
    "dmn-weak",
    "boostadapter",
    "dpe",
    "ecalp:nodes=4",
    "onzeta:length=20",
    "dota",
    "bca",
    "tda+se",
]


def alone(model: Any, method: str, images: list[bytes], views: int = 8) -> list[dict[str, Any]]:
    """What `Classifier.stream` answers."""
    classifier = Classifier(CLASSES, model, method, views=views)
    answers = [prediction.to_dict() for prediction in classifier.stream(iter(images))]  # type: ignore[union-attr]
    return [{name: answer[name] for name in ("ranked", "why")} for answer in answers]


def of_server(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: answer[name] for name in ("ranked", "why")} for answer in answers]


def seen(answer: httpx.Response) -> int:
    """How many images the session had learned from before."""
    assert answer.status_code == 200, answer.text
    remembered: int = answer.json()["why"]["remembered"]
    return remembered


@pytest.mark.parametrize("method", METHODS)
def test_a_session_is_a_stream(server: Running, tiny_model: CLIP, method: str) -> None:
    options = {"method": method, "session": f"one by one {method}"}
    answers = [server.ask(image, **options).json() for image in IMAGES]
    expected = alone(tiny_model, method, IMAGES)
    assert of_server(answers) == expected
    assert [answer["why"]["remembered"] for answer in answers] == list(range(6))
    together = {"images": [in_base64(image) for image in IMAGES], "classes": CLASSES, "views": 8, "method": method}
    batch = httpx.post(f"{server.url}/v1/classify/batch", json=together | {"session": f"together {method}"}, timeout=60)
    assert of_server(batch.json()["answers"]) == expected


def test_a_session_in_a_form(server: Running) -> None:
    fields = {"classes": CLASSES, "views": "1", "method": "tda", "session": "form"}
    assert [seen(server.send(fields)) for _ in range(2)] == [0, 1]


def test_an_unreadable_image_teaches_nothing(server: Running, tiny_model: CLIP) -> None:
    images = [in_base64(content) for content in (IMAGES[0], b"no image", IMAGES[1])]
    asked = {"images": images, "classes": CLASSES, "views": 8, "method": "tda", "session": "unreadable"}
    first, bad, last = httpx.post(f"{server.url}/v1/classify/batch", json=asked, timeout=60).json()["answers"]
    assert bad["error"]["code"] == "unreadable_image"
    assert of_server([first, last]) == alone(tiny_model, "tda", IMAGES[:2])


def test_sessions_methods_and_class_lists_have_memories_of_their_own(server: Running) -> None:
    for _ in range(2):
        server.ask(method="tda", session="own")
    assert seen(server.ask(method="tda", session="other")) == 0
    assert seen(server.ask(method="tda:alpha=3", session="own")) == 0
    assert seen(server.ask(method="tda", session="own", classes=CLASSES[:2])) == 0
    assert seen(server.ask(method="tda", session="own", templates=["a sketch of a {}."])) == 0
    assert seen(server.ask(method="tda", session="own", views=1)) == 2  # by the same weak view


def test_methods_are_compared_without_a_memory(server: Running) -> None:
    assert_refused(server.compare(methods=["clip", "tda"]), 422, "invalid_method", "ask /v1/classify", "methods")


def test_a_session_is_forgotten_when_asked(server: Running) -> None:
    for method in ("tda", "bca"):
        server.ask(method=method, session="a/b c")
    assert httpx.delete(f"{server.url}/v1/sessions/a/b%20c").json() == {"forgotten": 2}
    assert httpx.delete(f"{server.url}/v1/sessions/a/b%20c").json() == {"forgotten": 0}
    assert seen(server.ask(method="tda", session="a/b c")) == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def in_turn(server: Running, pool: ThreadPoolExecutor, images: list[bytes], **options: Any) -> list[Future[Any]]:
    """Requests that are sent one after the other and wait for each other's answers."""
    requests = []
    for image in images:
        before = server.service.in_flight
        requests.append(pool.submit(server.ask, image, **options))
        eventually(lambda before=before: server.service.in_flight > before)  # type: ignore[misc]
    return requests


def test_requests_of_a_session_are_answered_in_the_order_in_which_they_came(
    waiting: Waiting, tiny_model: CLIP, pool: ThreadPoolExecutor
) -> None:
    with running(Settings(threads=4), waiting) as server:
        requests = in_turn(server, pool, IMAGES, method="tda", session="a")
        waiting.may.set()
        answers = [request.result().json() for request in requests]
    assert of_server(answers) == alone(tiny_model, "tda", IMAGES)


def test_who_hangs_up_does_not_disturb_the_order(waiting: Waiting, tiny_model: CLIP, pool: ThreadPoolExecutor) -> None:
    with running(Settings(threads=4), waiting) as server:
        impatient = pool.submit(server.ask, IMAGES[5], timeout=1, method="tda", session="a")
        eventually(lambda: waiting.calls)  # the model thread has it
        first = pool.submit(server.ask, IMAGES[0], method="tda", session="a")
        with pytest.raises(httpx.TimeoutException):
            impatient.result()
        eventually(lambda: server.service.in_flight == 1)
        second = in_turn(server, pool, [IMAGES[1]], method="tda", session="a")[0]
        assert not first.done()  # its turn comes when the model thread has ended with the one before
        waiting.may.set()
        answers = [request.result().json() for request in (first, second)]
        eventually(lambda: not server.service.in_flight)
    # The image of who hung up was never answered, so nothing was learned from it.
    assert of_server(answers) == alone(tiny_model, "tda", IMAGES[:2])


def test_a_session_that_is_reset_while_images_wait_starts_anew(waiting: Waiting, pool: ThreadPoolExecutor) -> None:
    with running(Settings(threads=4), waiting) as server:
        requests = in_turn(server, pool, IMAGES[:3], method="tda", session="a")
        eventually(lambda: waiting.calls)
        assert httpx.delete(f"{server.url}/v1/sessions/a").json() == {"forgotten": 1}
        waiting.may.set()
        assert [seen(request.result()) for request in requests] == [0, 0, 1]
        assert len(server.service.sessions) == 1


def test_the_session_that_was_not_used_for_longest_makes_room(tiny_model: CLIP) -> None:
    with running(Settings(limits=Limits(sessions=2)), tiny_model) as server:
        for name in ("a", "b", "a", "c"):
            server.ask(method="tda", session=name)
        assert server.metric("usetta_sessions") == 2
        assert seen(server.ask(method="tda", session="a")) == 2
        assert seen(server.ask(method="tda", session="b")) == 0  # made room for c, and now c for it
        assert seen(server.ask(method="tda", session="c")) == 0


def test_memories_have_so_many_bytes_in_all(tiny_model: CLIP) -> None:
    dim = tiny_model.embed_dim
    one = 4 * 3 * (5 * (dim + 1) + 2 * 3 / 4)  # TDA's caches for three classes
    with running(Settings(session_bytes=int(2.5 * one)), tiny_model) as server:
        for name in ("a", "b", "c"):
            server.ask(method="tda", session=name)
        assert len(server.service.sessions) == 2
        refused = server.ask(method="dmn", session="a")
        assert_refused(refused, 422, "too_costly", "the memory of 'dmn' for 3 classes takes", "method")
        assert seen(server.ask(method="tda", session="c")) == 1


def test_sessions_in_use_are_never_taken_away(waiting: Waiting, pool: ThreadPoolExecutor) -> None:
    with running(Settings(limits=Limits(sessions=1)), waiting) as server:
        waiting.may.set()
        assert seen(server.ask(method="tda", session="a")) == 0
        waiting.may.clear()
        held = in_turn(server, pool, [IMAGES[0]], method="tda", session="a")[0]
        eventually(lambda: len(waiting.calls) == 2)
        refused = server.ask(method="tda", session="b")
        assert_refused(refused, 503, "sessions_full", "too many sessions are in use")
        assert refused.headers["retry-after"] == "5"
        waiting.may.set()
        assert seen(held.result()) == 1


def test_what_nobody_uses_is_forgotten(tiny_model: CLIP) -> None:
    with running(Settings(session_seconds=0.3), tiny_model) as server:
        for _ in range(3):
            server.ask(method="tda", session="a")
        assert len(server.service.sessions) == 1
        eventually(lambda: len(server.service.sessions) == 0)
        assert seen(server.ask(method="tda", session="a")) == 0
        assert server.metric("usetta_sessions") == 1


def test_a_session_belongs_to_a_key(tiny_model: CLIP) -> None:
    keys = [{"x-api-key": "one"}, {"x-api-key": "two"}]
    with running(Settings(keys=("one", "two")), tiny_model) as server:
        assert [seen(server.ask(method="tda", session="a", headers=keys[i])) for i in (0, 0, 1)] == [0, 1, 0]
        forgotten = [httpx.delete(f"{server.url}/v1/sessions/a", headers=keys[i]).json() for i in (1, 1)]
        assert forgotten == [{"forgotten": 1}, {"forgotten": 0}]
        assert seen(server.ask(method="tda", session="a", headers=keys[0])) == 2
        assert httpx.delete(f"{server.url}/v1/sessions/a").status_code == 401


def test_an_answer_that_fails_leaves_no_half_learned_memory(tiny_model: CLIP) -> None:
    class Broken:
        """Encodes to NaN when it is asked to."""

        is_broken = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model, name)

        def encode_images(self, pixels: Any) -> Any:
            return tiny_model.encode_images(pixels) * (float("nan") if self.is_broken else 1)

    model = Broken()
    with running(Settings(), model) as server:
        assert [seen(server.ask(method="tda", session="a")) for _ in range(2)] == [0, 1]
        model.is_broken = True
        assert_refused(server.ask(method="tda", session="a"), 422, "invalid_request", "NaN")
        model.is_broken = False
        assert seen(server.ask(method="tda", session="a")) == 0


def test_settings_of_sessions_are_checked() -> None:
    for name in ("session_bytes", "session_seconds"):
        with pytest.raises(ValueError, match=name):
            replace(Settings(), **{name: 0})


def test_who_gives_up_while_waiting_leaves_the_session_to_expire() -> None:
    numbers: list[int] = []

    async def use() -> None:
        sessions = SessionCache(4, 1000, 0.01, numbers.append)
        nothing: Any = None
        key = SessionKey("a", "", nothing, nothing)
        made: list[Any] = []

        async def wait() -> None:
            async with sessions.turn(key, 1, make):
                raise AssertionError("it was not its turn")

        def make() -> Any:
            made.append(SimpleNamespace())
            return made[-1]

        async with sessions.turn(key, 1, make) as turn:
            impatient = asyncio.create_task(wait())
            await asyncio.sleep(0.02)
            impatient.cancel()
            with pytest.raises(asyncio.CancelledError):
                await impatient
            await asyncio.sleep(0.05)
            assert len(sessions) == 1, "one still uses it"
        assert made == [turn.memory]
        for _ in range(1000):
            if not len(sessions):
                break
            await asyncio.sleep(0.01)
        assert numbers == [1, 0]

    asyncio.run(use())
