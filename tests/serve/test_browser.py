"""The page in a real browser: Debian's Chromium, driven by Playwright, against a server in a process of its own.

Any request to another host and anything the browser complains about fails the test that was running. `make browser`
installs Chromium where it can.
"""

import base64
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from conftest import make_image
from serve.conftest import CLASSES, in_base64, saved
from serve.test_process import started

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
IMAGE = saved(make_image(0, (120, 80)), "PNG")
KEY = "a key with spaces"

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


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Path) -> Iterator[str]:
    with started(tiny_checkpoint) as (_, address):
        yield address


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; at the end of the test nothing may have gone wrong in the browser."""
    wrong: list[str] = []
    contexts = []

    def complain(kind: str, text: str) -> None:
        wrong.append(f"{kind}: {text}")

    def watch(page: Any, address: str) -> None:
        def requested(request: Any) -> None:
            if not request.url.startswith((f"{address}/", "data:", "blob:")):
                complain("request", request.url)

        page.on("request", requested)
        page.on("pageerror", lambda error: complain("error", str(error)))
        page.on("console", lambda said: said.type == "error" and complain("console", said.text))

    def visit(width: int = 1280, address: str = url, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # a busy machine is no failure
        watch(page, address)
        page.goto(address)
        page.wait_for_selector("#classify")
        page.wait_for_load_state("networkidle")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


def upload(page: Any, content: bytes = IMAGE, name: str = "image.png") -> None:
    page.set_input_files("#image-file", {"name": name, "mimeType": "image/png", "buffer": content})


def classify(page: Any, classes: list[str] | None = None) -> Any:
    """The answer after a click, or what is wrong."""
    page.fill("#classes textarea", "\n".join(CLASSES if classes is None else classes))
    page.click("#classify")
    page.wait_for_selector("#answer .answer, #answer .problem")
    return page.locator("#answer")


def overflow(page: Any) -> int:
    pixels: int = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    return pixels


def test_an_image_is_classified_and_the_answer_explained(visit: Callable[..., Any], url: str, tmp_path: Path) -> None:
    page = visit()
    upload(page)
    page.wait_for_selector("#image img")
    page.get_by_label("SE", exact=True).uncheck()
    assert page.get_by_label("USE", exact=True).is_checked()
    answer = classify(page)
    asked = {"image": in_base64(IMAGE), "classes": CLASSES, "method": "use"}
    expected = httpx.post(f"{url}/v1/classify", json=asked, timeout=60).json()
    assert answer.locator(".card h3").all_inner_texts() == ["Zero-shot", "USE"]
    assert answer.locator(".card .label bdi").last.inner_text() == expected["label"]
    assert answer.locator(".card .reason").last.inner_text() == expected["why"]["reason"]
    bars = answer.locator(".bar")
    assert bars.count() == 2 * len(CLASSES)
    widths = [bars.nth(i).locator("i").bounding_box()["width"] for i in range(bars.count())]
    track = bars.first.locator(".track").bounding_box()["width"]
    assert max(widths[1::2]) / track == pytest.approx(expected["probability"], abs=0.01)
    assert answer.locator(".views li").count() == expected["why"]["views"]
    assert answer.locator(".views li.weak").count() == 1
    marked = answer.locator(".views li.marked")
    assert marked.count() == len(expected["why"]["chosen_views"])
    assert marked.locator(".badge").all_inner_texts() == ["✓ USE"] * marked.count()
    assert marked.locator(".own").all_inner_texts() == expected["why"]["chosen_labels"]
    assert f"β = {expected['why']['beta']:.2f}" in answer.inner_text()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert Image.open(tmp_path / "page.png").width == 1280


def test_another_image_can_follow_dropped_on_the_field(visit: Callable[..., Any]) -> None:
    page = visit()
    upload(page)
    assert "image.png" in page.locator("#image img").get_attribute("src")
    dropped = page.evaluate_handle(
        """(content) => {
            const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0)), data = new DataTransfer();
            data.items.add(new File([bytes], "an other one's.png", { type: "image/png" }));
            return data;
        }""",
        in_base64(IMAGE),
    )
    page.dispatch_event("#image label", "drop", {"dataTransfer": dropped})
    page.wait_for_function("document.querySelector('#image img')?.src.includes('other')")
    answer = classify(page)
    with page.expect_download() as download:
        answer.get_by_text("Numbers (JSON)").click()
    assert json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["source"] == "an other one's.png"


def test_everything_can_be_done_with_the_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()

    def tab_to(where: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(f"document.activeElement === document.querySelector({where!r})"):
                return
        pytest.fail(f"there is no way to {where} by the tabulator")

    tab_to("#image-file")
    tab_to("#example-rocket")
    page.keyboard.press("Enter")
    page.wait_for_selector("#image img")
    tab_to("#classes textarea")
    assert page.input_value("#classes textarea").startswith("rocket\n")
    tab_to("#classify")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer .answer")
    tab_to("#answer a[download='usetta.json']")
    tab_to("#answer a[download='usetta.jpg']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_width_of_a_phone(visit: Callable[..., Any], scheme: str) -> None:
    page = visit(width=390, color_scheme=scheme, has_touch=True)
    assert overflow(page) <= 0
    upload(page)
    answer = classify(page, ["tabby cat", "x" * 150, "a rather long name of a class, with several words in it"])
    assert answer.locator(".card").count() == 3
    assert overflow(page) <= 0
    for place in (".card", ".bar .much", ".scale", ".views li", ".files a"):
        box = answer.locator(place).last.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_the_answer_can_be_kept_as_json_and_as_an_image(visit: Callable[..., Any]) -> None:
    page = visit(accept_downloads=True)
    upload(page, name="my cat.png")
    answer = classify(page)
    with page.expect_download() as numbers:
        answer.locator("a[download='usetta.json']").click()
    saved_numbers = json.loads(Path(numbers.value.path()).read_text(encoding="utf-8"))
    assert (numbers.value.suggested_filename, saved_numbers["source"]) == ("usetta.json", "my cat.png")
    assert [row["method"] for row in saved_numbers["answers"]] == ["clip", "se", "use"]
    with page.expect_download() as image:
        answer.locator("a[download='usetta.jpg']").click()
    assert Image.open(io.BytesIO(Path(image.value.path()).read_bytes())).width == 1540


def test_what_is_wrong_is_reported_and_can_be_corrected(visit: Callable[..., Any]) -> None:
    page = visit()
    assert "There is no image yet" in classify(page).inner_text()
    upload(page, b"no image at all", "notes.png")
    page.wait_for_timeout(500)  # the browser cannot show it, so that there is nothing to wait for
    assert "not an image, or in an unsupported format" in classify(page).inner_text()
    upload(page)
    page.wait_for_selector("#image img")
    assert "at least two classes" in classify(page, ["tabby cat"]).inner_text()
    assert classify(page).locator(".card").count() == 3


def test_a_file_that_is_too_large_is_not_sent(visit: Callable[..., Any]) -> None:
    page = visit()
    upload(page, IMAGE + bytes(13 * 2**20))
    page.wait_for_function("document.querySelector('#image .problem').textContent")
    assert "13.0 MB; this server takes up to 11.7 MB" in page.locator("#image .problem").inner_text()


def test_what_is_typed_is_never_run(visit: Callable[..., Any]) -> None:
    page = visit()
    nasty = ["<img src=x onerror='document.title=1'>", "${document.title=2}{{value}}", "</script>`", "שלום"]
    upload(page)
    answer = classify(page, nasty)
    assert sorted(answer.locator(".bars dt").all_inner_texts()) == sorted(nasty)
    assert page.title() == "usetta"


def test_with_keys_the_browser_asks_for_one(visit: Callable[..., Any], tiny_checkpoint: Path) -> None:
    with started(tiny_checkpoint, "--api-key", KEY) as (_, address):
        page = visit(address=address, http_credentials={"username": "anybody", "password": KEY})
        page.click("#example-cat")
        page.wait_for_selector("#image img")
        assert classify(page).locator(".card").count() == 3


def test_the_examples_are_shown(visit: Callable[..., Any]) -> None:
    page = visit()
    page.click("#example-cat")
    page.wait_for_selector("#image img")
    source = page.locator("#image img").get_attribute("src")
    head, _, content = source.partition(";base64,")
    assert head == "data:image/jpeg;name=cat.jpg"
    assert Image.open(io.BytesIO(base64.b64decode(content))).format == "JPEG"
