"""The pages in a real browser: Debian's Chromium, driven by Playwright, against a server in a thread of this process.

Any request to another host, anything that the content security policy forbids and anything else that the browser
complains about fails the test that was running. `make browser` installs Chromium where it can.
"""

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import make_image
from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, running, saved
from usetta.models.clip import CLIP
from usetta.serve.settings import Settings

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
IMAGE = saved(make_image(3, (120, 80)), "PNG")
"""One that USE is tuned on."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (`make browser` installs it)"),
    pytest.mark.xdist_group("browser"),  # one Chromium for all
]


@pytest.fixture(scope="module")  # not longer: Playwright runs an event loop in this thread, and others start their own
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any, server: Running) -> Iterator[Callable[..., Any]]:
    """Opens a page of a server; at the end of the test nothing may have gone wrong in the browser."""
    wrong: list[str] = []
    contexts = []

    def visit(path: str = "/", width: int = 1280, url: str = server.url, expected: str = "$^", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)  # a busy machine is no failure

        def complain(kind: str, text: str) -> None:
            if not re.search(expected, text):
                wrong.append(f"{kind}: {text}")

        def requested(request: Any) -> None:
            if not request.url.startswith((f"{url}/", "data:", f"blob:{url}/")):
                complain("request", request.url)

        page.on("request", requested)
        page.on("pageerror", lambda error: complain("error", str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and complain("console", said.text))
        page.goto(url + path)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


def upload(page: Any, content: bytes = IMAGE, name: str = "image.png") -> None:
    page.set_input_files("#image-file", {"name": name, "mimeType": "image/png", "buffer": content})


def classify(page: Any, classes: list[str] | None = None) -> Any:
    """The answer after a click."""
    page.fill("#classes", "\n".join(CLASSES if classes is None else classes))
    page.click("#classify")
    page.wait_for_selector("#answer:not(.stale) .card")
    return page.locator("#answer")


def overflow(page: Any) -> int:
    pixels: int = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    return pixels


def dropped(page: Any, name: str, padding: int = 0) -> Any:
    """What a browser makes of a file that is dropped or pasted; `padding` bytes make it longer."""
    return page.evaluate_handle(
        """([content, name, padding]) => {
            const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0)), data = new DataTransfer();
            data.items.add(new File([bytes, new Uint8Array(padding)], name, { type: "image/png" }));
            return data;
        }""",
        [in_base64(IMAGE), name, padding],
    )


def test_an_image_is_classified_and_the_answer_explained(visit: Callable[..., Any], server: Running) -> None:
    page = visit()
    upload(page)
    page.wait_for_selector("#preview")
    page.get_by_label("SE", exact=True).uncheck()
    answer = classify(page)
    expected = server.ask(IMAGE, method="use", views="adaptive").json()
    why = expected["why"]
    assert answer.locator(".card h3").all_inner_texts() == ["Zero-shot", "USE"]
    assert answer.locator(".card .label bdi").last.inner_text() == expected["label"]
    assert answer.locator(".card .reason").last.inner_text() == why["reason"]
    bars = answer.locator(".bar")
    assert bars.count() == 2 * len(CLASSES)
    widths = [bars.nth(i).locator("i").bounding_box()["width"] for i in range(bars.count())]
    track = bars.first.locator(".track").bounding_box()["width"]
    assert max(widths[1::2]) / track == pytest.approx(expected["probability"], abs=0.01)
    assert answer.locator(".views li").count() == why["views"]
    assert answer.locator(".views li.weak").count() == 1
    entropies = [float(text.removeprefix("entropy ")) for text in answer.locator(".entropy").all_inner_texts()]
    assert entropies[0] == pytest.approx(why["entropies"][0], abs=0.006)
    assert entropies[1:] == sorted(entropies[1:])
    marked = answer.locator(".views li.marked")
    assert marked.locator(".badge").all_inner_texts() == ["✓ USE"] * len(why["chosen_views"])
    assert sorted(marked.locator(".own").all_inner_texts()) == sorted(why["chosen_labels"])
    assert f"β = {why['beta']:.2f}" in answer.inner_text()
    mark, line = answer.locator(".line i").bounding_box(), answer.locator(".line").bounding_box()
    place = (mark["x"] + mark["width"] / 2 - line["x"]) / line["width"]
    assert place == pytest.approx((why["beta"] - 0.3) / 0.4, abs=0.01)
    rows = answer.locator(".changes tbody tr").all_inner_texts()
    best = next(row for row in rows if row.startswith(expected["label"]))
    assert f"{100 * why['before']['probability']:.0f} %" in best


def test_progress_is_shown_and_an_answer_that_no_longer_holds_is_dimmed(
    visit: Callable[..., Any], waiting: Waiting
) -> None:
    with running(Settings(), waiting) as server:
        page = visit(url=server.url)
        upload(page)
        page.fill("#classes", "\n".join(CLASSES))
        page.get_by_label("16", exact=True).check()
        page.click("#classify")
        page.get_by_text("Encoding views: 0 of 16").wait_for()
        page.click("#cancel")
        page.wait_for_selector("#progress", state="hidden")
        page.click("#classify")
        waiting.may.set()
        page.wait_for_selector("#answer:not(.stale) .card")
        assert page.locator("#bar").evaluate("(bar) => bar.value") == 1
        assert page.locator("#progress").is_hidden()
        for change, back in (
            (lambda: page.fill("#classes", "a\nb"), lambda: page.fill("#classes", "\n".join(CLASSES))),
            (lambda: page.get_by_label("8", exact=True).check(), lambda: page.get_by_label("16", exact=True).check()),
            (lambda: upload(page, name="other.png"), None),
        ):
            change()
            page.wait_for_selector("#answer.stale")
            assert page.locator("#stale").is_visible()
            if back:
                back()
                page.wait_for_selector("#answer:not(.stale)")
                assert page.locator("#stale").is_hidden()


def test_an_image_can_be_dropped_pasted_or_taken_by_the_camera_and_numbers_saved(visit: Callable[..., Any]) -> None:
    page = visit()
    page.dispatch_event("#image label", "drop", {"dataTransfer": dropped(page, "an other one's.png")})
    answer = classify(page)
    with page.expect_download() as download:
        answer.locator("#save-json").click()
    assert download.value.suggested_filename == "usetta.json"
    numbers = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [row["method"] for row in numbers["answers"]] == ["clip", "se", "use"]
    assert (numbers["answers"][0]["source"], numbers["settings"]["classes"]) == ("an other one's.png", CLASSES)
    assert numbers["views"][0].keys() == {"label", "entropy"}
    page.evaluate(
        "(data) => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }))", dropped(page, "x.png")
    )
    page.wait_for_selector("#answer.stale")
    classify(page)
    page.click("#camera")
    eventually(lambda: page.evaluate("document.querySelector('video').videoWidth > 0"))
    page.click("#shoot")
    page.wait_for_selector("#answer.stale")
    assert classify(page).locator(".card").count() == 3
    assert page.evaluate("document.querySelector('video').srcObject") is None


def test_everything_can_be_done_with_the_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()
    page.wait_for_selector("#other-methods label", state="attached")

    def tab_to(where: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(f"document.activeElement === document.querySelector({where!r})"):
                return
        pytest.fail(f"there is no way to {where} by the tabulator")

    tab_to("#image-file")
    tab_to("#example-rocket")
    page.keyboard.press("Enter")
    page.wait_for_selector("#preview")
    tab_to("#classes")
    assert page.input_value("#classes").startswith("rocket\n")
    tab_to("#more-methods summary")
    page.keyboard.press("Enter")
    tab_to("#other-methods input[value='tpt']")
    page.keyboard.press("Space")
    tab_to("#classify")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer .card")
    assert page.locator("#answer .card h3").all_inner_texts() == ["Zero-shot", "SE", "USE", "TPT"]
    tab_to("#save-json")
    tab_to("#save-png")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "usetta.png"
    figure = Image.open(io.BytesIO(Path(download.value.path()).read_bytes()))
    assert (figure.format, figure.width) == ("PNG", 2400)
    assert (0, 0x72, 0xB2) in {colour[:3] for _, colour in figure.getcolors(2**24)}  # the bars of SE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_width_of_a_phone(visit: Callable[..., Any], scheme: str) -> None:
    page = visit("/#views=16", width=390, color_scheme=scheme, has_touch=True)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(11, 15, 25)")
    upload(page)
    answer = classify(page, ["tabby cat", "x" * 150, "a rather long name of a class, with several words in it"])
    assert overflow(page) <= 0
    for place in (".card", ".bar .much", ".scale", ".views li", ".files button"):
        box = answer.locator(place).last.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_what_is_wrong_is_reported_and_can_be_corrected(visit: Callable[..., Any]) -> None:
    page = visit()
    problem = page.locator("#problem")

    def refused(message: str, classes: list[str] = CLASSES) -> None:
        page.fill("#classes", "\n".join(classes))
        page.click("#classify")
        page.get_by_text(message).wait_for()

    refused("There is no image yet")
    upload(page, b"no image at all", "notes.png")
    page.get_by_text("notes.png, which the browser cannot show").wait_for()
    refused("not an image, or in an unsupported format")
    page.dispatch_event("#image label", "drop", {"dataTransfer": dropped(page, "large.png", 16 * 2**20)})
    page.get_by_text("This file has 16.0 MB; this server takes up to 15.9 MB.").wait_for()
    upload(page)
    assert page.locator("#image-problem").is_hidden()
    refused("at least two classes", ["tabby cat"])
    page.locator("#more-settings summary").click()
    page.fill("#template", "a photo")
    refused("a template must contain {} once")
    page.fill("#template", "a drawing of a {}.")
    classify(page)
    assert problem.is_hidden()


def test_a_problem_stays_when_the_server_says_late_what_it_offers(visit: Callable[..., Any]) -> None:
    page = visit("/docs")
    held: list[Any] = []
    page.context.route("**/v1/methods", lambda route: held.append(route))  # Playwright marks the function
    page.goto(page.url.removesuffix("docs"))
    page.click("#classify")
    page.get_by_text("There is no image yet").wait_for()
    for route in held:
        route.continue_()
    page.wait_for_selector("#model option", state="attached")  # the last that the page learns from the server
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.locator("#problem").inner_text().startswith("There is no image yet")


def test_what_is_typed_is_never_run(visit: Callable[..., Any]) -> None:
    nasty = ["<img src=x onerror='document.title=1'>", "${document.title=2}{{value}}", "</script>`", "שלום"]
    page = visit()
    upload(page, name="<img src=x onerror='document.title=3'>.png")
    answer = classify(page, nasty)
    assert sorted(answer.locator(".bars dt").all_inner_texts()) == sorted(nasty)
    page.reload()
    assert page.input_value("#classes").split("\n") == nasty
    assert page.title() == "usetta"


def test_settings_are_in_the_address_and_the_image_is_not(visit: Callable[..., Any]) -> None:
    page = visit("/#classes=red+fox%0Acat&methods=se,tpt,nothing&views=16&template=art+of+a+%7B%7D.")
    page.wait_for_selector("#other-methods input[value='tpt']:checked")
    upload(page)
    page.click("#classify")
    page.wait_for_selector("#answer .card")
    answer = page.locator("#answer")
    assert answer.locator(".card h3").all_inner_texts() == ["SE", "TPT"]
    assert answer.locator(".views li").count() == 16
    assert sorted(answer.locator(".bars dt").all_inner_texts()) == ["cat", "red fox"]
    assert page.input_value("#template") == "art of a {}."
    page.get_by_label("adaptive", exact=True).check()
    page.fill("#classes", "cat, dog , cat")
    address = page.evaluate("location.href")
    assert address.endswith("/#classes=cat%0Adog&methods=se%2Ctpt&template=art+of+a+%7B%7D.")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-link")
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == address
    page.evaluate("location.hash = '#classes=one%0Atwo'")
    eventually(lambda: page.input_value("#classes") == "one\ntwo")
    assert page.locator("#methods input:checked").count() == 3


def test_a_key_is_asked_for_and_kept_in_memory_alone(visit: Callable[..., Any], tiny_model: CLIP) -> None:
    key = "Schlüssel für später"
    with running(Settings(keys=(key,)), tiny_model) as server:
        page = visit("/#methods=clip,tpt", url=server.url, expected="401")
        page.get_by_text("Send a key").wait_for()
        page.fill("#key", "wrong")
        page.click("#example-cat")
        page.wait_for_selector("#preview")
        page.click("#classify")
        page.get_by_text("Send a key").wait_for()
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#other-methods input[value='tpt']:checked")  # the link is not forgotten meanwhile
        page.wait_for_selector("#answer .card")
        assert page.locator("#problem").is_hidden()
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        assert "Schl" not in page.evaluate("location.href")
        docs = visit("/docs", url=server.url, expected="401")
        docs.fill("#key", key)
        docs.keyboard.press("Enter")
        docs.wait_for_selector(".operation")
        assert "-H 'Authorization: Bearer KEY'" in docs.locator("#v1-compare pre").first.inner_text()
        assert "Bearer" not in docs.locator("#healthz pre").inner_text()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_api_is_described(visit: Callable[..., Any], width: int) -> None:
    page = visit("/docs", width=width)
    page.wait_for_selector(".operation")
    assert overflow(page) <= 0
    assert "undefined" not in page.inner_text("body")
    described = page.locator(".operation h2 code").all_inner_texts()
    assert described == page.evaluate("fetch('openapi.json').then((r) => r.json()).then((d) => Object.keys(d.paths))")
    fields = page.locator("#v1-compare table").first.inner_text()
    for part in ("methods", "up to 16 strings", "show_views", "up to 1000 strings", "from 1 to 128"):
        assert part in fields
    examples = page.locator("#v1-compare pre").first.inner_text().splitlines()
    assert ["-F" in shlex.split(line) for line in examples] == [True, True]
