"""What the server answers is what the library answers, whoever else asks at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from usetta import Classifier, methods
from usetta.coop import save_context
from usetta.methods.recipe import READOUTS
from usetta.models.clip import CLIP, random_model
from usetta.prompts import ClassPrompts
from usetta.rejection import Calibration
from usetta.serve.monitoring import ServerMetrics
from usetta.serve.service import ModelService
from usetta.serve.settings import Limits, Settings

NEAR = {"rel": 0, "abs": 1e-4}


def expected(model: CLIP, content: bytes, classes: list[str], method: str = "se", **settings: Any) -> dict[str, Any]:
    return Classifier(classes, model, method, **settings)(content).to_dict(top=None)


def assert_same(answer: dict[str, Any], right: dict[str, Any], top: int | None = None) -> None:
    """Every number near, everything else equal."""
    assert answer["label"] == right["label"]
    assert [row["label"] for row in answer["ranked"]] == [row["label"] for row in right["ranked"]][:top]
    for got, want in zip(answer["ranked"], right["ranked"], strict=False):
        assert got["probability"] == pytest.approx(want["probability"], **NEAR)
    assert answer["zero_shot"]["label"] == right["zero_shot"]["label"]
    assert answer["zero_shot"]["probability"] == pytest.approx(right["zero_shot"]["probability"], **NEAR)
    assert answer["why"].keys() == right["why"].keys()
    for name, want in right["why"].items():
        if name in ("delta", "beta", "entropies", "weights") and want is not None:
            assert answer["why"][name] == pytest.approx(want, **NEAR), name
        elif name == "before" and want is not None:
            assert answer["why"]["before"]["label"] == want["label"]
        elif name != "reason":  # it holds rounded numbers
            assert answer["why"][name] == want, name


@pytest.mark.parametrize("method", [*methods.names(), "tpt+se", "use:steps=2:skip=false"])
def test_every_method_answers_as_the_classifier_does(server: Running, tiny_model: CLIP, method: str) -> None:
    answer = server.ask(png(3), method=method, top=3)
    assert answer.status_code == 200, answer.text
    assert answer.json()["method"] == methods.get(method).name
    assert answer.json()["model"] == "tiny-random"
    assert_same(answer.json(), expected(tiny_model, png(3), CLASSES, method, views=8))


@pytest.mark.parametrize(
    "options",
    [
        {"views": 2},
        {"views": 16, "augmix": True},
        {"seed": 7},
        {"templates": ["art of the {}."]},
        {"templates": ["ensemble"]},
        {"templates": ["a {}.", "the {}."]},
    ],
)
def test_options_are_those_of_the_classifier(server: Running, tiny_model: CLIP, options: dict[str, Any]) -> None:
    answer = server.ask(png(1), **options)
    assert answer.status_code == 200, answer.text
    assert_same(answer.json(), expected(tiny_model, png(1), CLASSES, **{"views": 8} | options))


def test_an_answer_may_be_rejected(server: Running) -> None:
    for below, rejected in ((1, True), (0, False), (None, None)):
        assert server.ask(png(1), reject="margin", reject_below=below).json()["rejected"] is rejected
    refused = server.send({"classes": CLASSES, "reject_below": "2"})
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "reject_below"


def test_a_calibration_counts_for_its_method_and_the_default_model(
    tiny_model: CLIP, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    known, path = Calibration("tiny", tiny_model.fingerprint, "se", 2.0, 0.5, 0.9, 0.8, 100), tmp_path / "c.json"
    known.save(path)
    with running(Settings(calibration=path, extra_models=(str(tiny_checkpoint),)), tiny_model) as server:
        right = Classifier(CLASSES, tiny_model, views=8, calibration=path)(png(1))
        answer = server.ask(png(1)).json()
        assert answer["calibrated"] == pytest.approx(right.calibrated, abs=1e-4)
        assert answer["rejected"] is right.rejected
        assert server.ask(png(1), reject_below=0).json()["rejected"] is False
        assert server.ask(png(1), reject_below=1).json()["rejected"] is True
        for other in ({"method": "use"}, {"reject": "margin"}, {"model": "open_clip_model"}):
            plain = server.ask(png(1), **other).json()
            assert (plain["rejected"], plain["calibrated"]) == (None, None), other
        compared = server.compare(png(1), methods=["se", "use"]).json()["answers"]
        assert [one["calibrated"] for one in compared] == [answer["calibrated"], None]


def test_a_calibration_of_another_model_is_refused(tiny_model: CLIP, tmp_path: Path) -> None:
    Calibration("other", "0" * 64, "se", 2.0, 0.5, 0.9, 0.8, 100).save(tmp_path / "c.json")
    service = ModelService(Settings(calibration=tmp_path / "c.json"), ServerMetrics(), tiny_model)
    service.start()
    eventually(lambda: service.failure)
    assert "the calibration was fitted on the model other, and tiny-random is another" in str(service.failure)
    with pytest.raises(ValueError, match=r"cannot read the calibration .*nowhere\.json: No such file"):
        ModelService(Settings(calibration=tmp_path / "nowhere.json"), ServerMetrics(), tiny_model)


def test_a_form_says_the_same_as_json(server: Running) -> None:
    fields = {"classes": CLASSES, "method": "use", "views": "8", "augmix": "true", "seed": "3", "top": "2"}
    by_form = server.send(fields)
    by_json = server.ask(method="use", augmix=True, seed=3, top=2)
    assert by_form.status_code == 200, by_form.text
    assert by_form.json() | {"source": ""} == by_json.json() | {"source": ""}
    assert by_form.json()["source"] == "cat.png"
    assert by_json.json()["source"] == "image"
    assert len(by_form.json()["ranked"]) == 2


def test_class_names_of_a_form_may_come_one_per_line(server: Running) -> None:
    one_per_line = server.send({"classes": "tabby cat\r\n\r\n  red fox \ngolden retriever\n", "views": "8"})
    assert one_per_line.json() == server.send({"classes": CLASSES, "views": "8"}).json()


def test_views_are_adaptive_unless_a_number_is_sent(server: Running, tiny_model: CLIP) -> None:
    classes, counts = CLASSES[:2], []
    for method in ("se", "use", "clip"):
        classifier = Classifier(classes, tiny_model, method)
        for seed in (1, 31, 36):
            asked = {"image": in_base64(png(seed)), "classes": classes, "method": method}
            answer = httpx.post(f"{server.url}/v1/classify", json=asked, timeout=60).json()
            right = classifier(png(seed)).to_dict(top=None)
            assert_same(answer, right)
            assert answer["probability"] == right["probability"]  # not merely near
            counts.append(answer["why"]["views"])
    assert counts == [1, 16, 40] * 2 + [1] * 3
    for views, count in (("adaptive", 16), ("12", 12)):
        answer = server.send({"classes": classes, "views": views}, png(31))
        assert answer.json()["why"]["views"] == count


def test_adaptive_views_stop_at_the_limit_of_the_server(tiny_model: CLIP) -> None:
    with running(Settings(limits=Limits(views=5)), tiny_model) as server:
        assert server.ask(png(36), views="adaptive").json()["why"]["views"] == 5
        assert server.ask(views=6).status_code == 422


def test_a_large_image_is_decoded_again_for_each_stage_and_answered_alike(
    tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usetta.serve.service._KEPT_PIXELS", 100)
    with running(Settings(), tiny_model) as server:
        answer = server.ask(png(36), views="adaptive").json()
    assert answer["why"]["views"] == 56
    assert_same(answer, expected(tiny_model, png(36), CLASSES))


def test_rewards_come_from_the_reward_model(tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = random_model(tiny_model.config, name="other", seed=7)
    monkeypatch.setattr("usetta.serve.service.load_model", lambda name, **_settings: other)
    rewarded = expected(tiny_model, png(2), CLASSES, "rlcf", views=8, reward_model=other)
    assert rewarded["probability"] != expected(tiny_model, png(2), CLASSES, "rlcf", views=8)["probability"]
    with running(Settings(reward_model="other", cache=tmp_path), tiny_model) as server:
        for _ in range(2):  # the second from the cache
            answer = server.ask(png(2), method="rlcf").json()
            assert_same(answer, rewarded)
            assert answer["probability"] == rewarded["probability"]


def test_with_a_cache_an_image_is_encoded_once(waiting: Waiting, tmp_path: Path) -> None:
    waiting.may.set()
    with running(Settings(cache=tmp_path), waiting) as server:
        answers = [server.ask(png(1), method=method).json() for method in ("se", "se", "use", "clip")]
    assert waiting.calls == [1, 7]
    assert answers[0] == answers[1]


def test_a_batch_has_an_answer_for_each_image_and_the_error_in_the_place_of_a_bad_one(
    server: Running, tiny_model: CLIP
) -> None:
    images = [in_base64(png(0)), in_base64(b"no image"), "no base64!", in_base64(png(1))]
    asked = {"images": images, "classes": CLASSES, "views": 4, "method": "use"}
    answer = httpx.post(f"{server.url}/v1/classify/batch", json=asked)
    assert answer.status_code == 200
    first, text, garbled, last = answer.json()["answers"]
    assert_same(first, expected(tiny_model, png(0), CLASSES, "use", views=4))
    assert_same(last, expected(tiny_model, png(1), CLASSES, "use", views=4))
    assert text["error"]["code"] == garbled["error"]["code"] == "unreadable_image"
    assert text["error"]["field"] == "images[1]"
    assert "not an image" in text["error"]["message"]
    assert "not valid base64" in garbled["error"]["message"]
    assert [row["source"] for row in (first, text, garbled, last)] == [f"images[{i}]" for i in range(4)]


def test_a_batch_by_form_keeps_the_names_of_the_files(server: Running) -> None:
    files = [("images", (f"{name}.png", content)) for name, content in [("a", png(0)), ("b", b"?"), ("ç", png(1))]]
    answer = httpx.post(f"{server.url}/v1/classify/batch", data={"classes": CLASSES, "views": "4"}, files=files)
    assert [row["source"] for row in answer.json()["answers"]] == ["a.png", "b.png", "ç.png"]
    assert ["error" in row for row in answer.json()["answers"]] == [False, True, False]


@pytest.mark.parametrize(
    "names",
    [
        ["🦊", "🐱 cat", "👩‍👩‍👧"],
        ["قط", "ثعلب أحمر", "\u202eתפוח\u202c"],
        ['a "quoted" cat', "it's \\ a {fox}", "</script><b>"],
        ["two\nlines", "tab\there", "nul\x00byte"],
        ["cat", "cat", "dog"],
    ],
)
def test_names_of_any_script_come_back_as_they_were(server: Running, tiny_model: CLIP, names: list[str]) -> None:
    answer = server.ask(classes=names)
    assert answer.status_code == 200, answer.text
    assert sorted(row["label"] for row in answer.json()["ranked"]) == sorted(names)
    assert_same(answer.json(), expected(tiny_model, png(), names, views=8))


def test_many_clients_with_their_own_classes_and_methods_get_their_own_answers(
    server: Running, tiny_model: CLIP
) -> None:
    lists = [CLASSES, ["apple", "pear"], [f"thing {i}" for i in range(20)], ["🦊", "قط"]]
    kinds = ["clip", "se", "use", "tpt", "zero", "mta", "ttl", "rlcf"]
    asked = [(png(i), lists[i % 4], kinds[i // 2], 2 + i % 3) for i in range(16)]
    together = threading.Barrier(len(asked))

    def ask(task: tuple[bytes, list[str], str, int]) -> httpx.Response:
        content, classes, method, views = task
        together.wait(30)
        return server.ask(content, classes=classes, method=method, views=views, top=20)

    with ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(ask, asked))
    for answer, (content, classes, method, views) in zip(answers, asked, strict=True):
        assert answer.status_code == 200, answer.text
        assert_same(answer.json(), expected(tiny_model, content, classes, method, views=views))


def test_on_a_cpu_images_are_encoded_by_themselves(waiting: Waiting, tiny_model: CLIP) -> None:
    """Then answers are those of `Classifier` to the last bit."""
    with running(Settings(), waiting) as server, ThreadPoolExecutor(6) as clients:
        first = clients.submit(server.ask, png(0), views=4)
        eventually(lambda: waiting.calls == [1])
        others = [clients.submit(server.ask, png(i), views=4, classes=CLASSES[: 1 + i]) for i in (1, 2)]
        others += [clients.submit(server.ask, png(3), views=1, method="clip")]
        eventually(lambda: server.service.waiting == 3)
        last = clients.submit(server.ask, png(4), views=8)
        eventually(lambda: server.service.waiting == 4)
        waiting.may.set()
        answers = [answer.result() for answer in (first, *others, last)]
        assert sorted(waiting.calls) == [1, 1, 1, 1, 1, 3, 3, 3, 7]
        assert server.metric("usetta_batch_images_count") == 5  # no more at a time than there are cores
    assert [answer.status_code for answer in answers] == [200] * 5
    for i, answer in enumerate(answers[:3]):
        assert_same(answer.json(), expected(tiny_model, png(i), (CLASSES[: 1 + i] if i else CLASSES), views=4))


def test_a_learned_context_is_used_unless_templates_are_sent(tiny_model: CLIP, tmp_path: Path) -> None:
    words = ClassPrompts(tiny_model.text, ["cat"]).context
    other = words.flip(0, 1)
    save_context(tmp_path / "context.safetensors", other, {"template": "a photo of a {}."})
    with running(Settings(context=tmp_path / "context.safetensors"), tiny_model) as server:
        learned = expected(tiny_model, png(), CLASSES, views=8, context=tmp_path / "context.safetensors")
        in_words = expected(tiny_model, png(), CLASSES, views=8)
        assert learned["probability"] != pytest.approx(in_words["probability"], abs=1e-3)
        assert_same(server.ask().json(), learned)
        assert_same(server.ask(templates=["a photo of a {}."]).json(), in_words)


def test_other_models_are_those_that_the_server_was_given(
    server: Running, tiny_model: CLIP, tiny_checkpoint: Path
) -> None:
    assert httpx.get(f"{server.url}/v1/models").json() == {
        "models": [{"name": "tiny-random", "default": True, "image_size": 32}],
        "limits": vars(Limits()),
    }
    with running(Settings(extra_models=(str(tiny_checkpoint),)), tiny_model) as other:
        rows = httpx.get(f"{other.url}/v1/models").json()["models"]
        assert [(row["name"], row["default"]) for row in rows] == [("tiny-random", True), ("open_clip_model", False)]
        answer = other.ask(model="open_clip_model")
        assert answer.json()["model"] == "open_clip_model"
        assert_same(answer.json(), expected(tiny_model, png(), CLASSES, views=8))


def test_other_models_are_never_downloaded(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, offline: bool = False, **_settings: object) -> CLIP:
        asked.append((name, offline))
        other = copy(tiny_model)
        other.name = name
        return other

    monkeypatch.setattr("usetta.serve.service.load_model", load)
    with running(Settings(extra_models=("one", "two")), tiny_model) as server:
        assert list(server.service.models) == ["tiny-random", "one", "two"]
    assert asked == [("one", True), ("two", True)]


def test_the_methods_are_listed(server: Running) -> None:
    listed = httpx.get(f"{server.url}/v1/methods").json()
    assert [row["name"] for row in listed["methods"]] == methods.names()
    assert {row["name"]: row["description"] for row in listed["methods"]}["use"] == methods.get("use").description
    assert listed["readouts"] == list(READOUTS)


def test_health_and_metrics(server: Running) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "alive"}
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
    before = server.metric("usetta_requests_total")
    httpx.get(f"{server.url}/v1/methods")
    assert server.metric("usetta_requests_total") == before + 2  # itself is counted when it is over
    assert server.metric("process_resident_memory_bytes") > 1e7
    assert server.metric("usetta_queue") == 0


def test_a_page_can_be_mounted_at_the_root(tiny_model: CLIP) -> None:
    from starlette.responses import PlainTextResponse
    from starlette.testclient import TestClient

    from usetta.serve.app import create_app

    app = create_app(Settings(keys=("secret",), page=False), tiny_model)
    app.mount("/", PlainTextResponse("a page"))
    with TestClient(app, base_url="http://localhost") as client:
        eventually(lambda: app.state.service.is_ready)
        assert client.get("/").status_code == 401
        client.headers["x-api-key"] = "secret"
        assert client.get("/anything").text == "a page"
        assert client.get("/v1/models").json()["models"][0]["name"] == "tiny-random"
