"""What one sees before there is an answer, and what happens on a click.

Gradio would load its fonts from elsewhere, send statistics and ask for its newest version; all of that is off. Events
do not go through Gradio's queue (`queue=False`): the server has one, and a request that is one HTTP exchange ends when
its caller hangs up. The page has an image field of its own instead of Gradio's, which would write uploads to disk.
"""

import json
from importlib.resources import files
from typing import Any

import gradio as gr
from gradio.events import api

from usetta import methods
from usetta.adaptive import ADAPTIVE, STAGES
from usetta.serve.page.show import title
from usetta.serve.settings import Limits

MAIN = ("clip", "se", "use")
"""Methods that are compared by default."""
EXAMPLES = {
    "cat": "tabby cat\ntiger cat\nEgyptian cat\nred fox",
    "coffee": "espresso\ncup of tea\nhot chocolate\nsoup bowl",
    "rocket": "rocket\nmissile\nspace shuttle\ncrane",
}
"""Images that come with the package (NOTICE says whose they are), and classes for each."""

_NOT_CALLED = "Gradio describes this function; usetta.serve.page.calls runs it"
_SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]
_FIELD = """
<div class="field">
  <input type="file" accept="image/*" id="image-file" aria-describedby="image-hint">
  <label for="image-file">
    ${value ? `<img src="${value}" alt="the image to classify">` : ''}
    <span id="image-hint">${value ? 'Another image: choose, drop or paste it here' :
      '<b>Drop an image here</b>, paste one, or press to choose a file'}</span>
  </label>
  <p role="alert" class="problem"></p>
</div>
"""


def read(name: str) -> str:
    """A text file of this package."""
    return (files("usetta.serve.page") / name).read_text(encoding="utf-8")


def theme() -> gr.themes.Base:
    """Gradio's theme with the fonts of the visitor's own machine."""
    return gr.themes.Default(font=_SANS, font_mono=_MONO, primary_hue="blue", neutral_hue="slate")


def build(welcome: str, limits: Limits) -> gr.Blocks:
    """The page. Gradio knows the signatures of the functions, but it is `calls` that runs them."""
    blocks: gr.Blocks
    with gr.Blocks(title="usetta", analytics_enabled=False) as blocks:
        gr.HTML(read("head.html"), elem_id="head")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                image, classes = _image_and_classes(limits)
                chosen = gr.CheckboxGroup(
                    [(title(name), name) for name in MAIN], value=list(MAIN), label="Methods to compare"
                )
                with gr.Accordion("More methods", open=False):
                    others = [name for name in methods.names() if name not in MAIN]
                    extra = gr.CheckboxGroup([(title(name), name) for name in others], show_label=False)
                views = gr.Radio(
                    [("adaptive", ADAPTIVE), *((str(n), n) for n in STAGES if n <= limits.views)],
                    value=ADAPTIVE,
                    label="Views",
                    info="The image itself and random crops of it. More are better, and slower on a CPU; the paper "
                    f"uses 64. Adaptive: up to {min(STAGES[-1], limits.views)}, but fewer where they leave no doubt.",
                )
                button = gr.Button("Classify", variant="primary", elem_id="classify")
            with gr.Column(scale=3, min_width=300):
                answer = gr.HTML(welcome, elem_id="answer")
        waiting = button.click(None, [views], [answer], js="(views) => [usetta.waiting(views)]", show_progress="hidden")
        answered = waiting.then(
            _show,
            [image, classes, chosen, extra, views],
            [answer],
            queue=False,
            show_progress="hidden",
            api_name="show",
            api_visibility="private",
        )
        answered.success(None, js="() => usetta.reveal()")
        answered.failure(None, None, [answer], js="() => [usetta.lost()]", show_progress="hidden")
        api(_compare, api_name="compare", queue=False)
    return blocks


# What Gradio's description of the API is made from: the names and types of the values.
def _show(image: str, classes: str, methods: list[str], extra_methods: list[str], views: int | str) -> str:
    raise AssertionError(_NOT_CALLED)


def _compare(image: str, classes: list[str], methods: list[str], views: int | str = ADAPTIVE) -> dict[str, Any]:
    """What several methods answer for an image (a file in base64), all from one encoding of its views."""
    raise AssertionError(_NOT_CALLED)


def _image_and_classes(limits: Limits) -> tuple[gr.HTML, gr.Textbox]:
    # An image grows by a third in base64, and a little is left for the class names.
    most = max(0, int(0.74 * limits.upload) - 2000 * 64)
    image = gr.HTML(
        "", html_template=_FIELD, js_on_load=read("field.js").replace("MOST_BYTES", str(most)), elem_id="image"
    )
    with gr.Row(elem_id="examples"):
        buttons = [
            gr.Button(f"Example: {name}", size="sm", elem_id=f"example-{name}", min_width=60) for name in EXAMPLES
        ]
    classes = gr.Textbox(
        label="Classes",
        info="What might it be? One per line, or with commas between.",
        placeholder="tabby cat\nred fox\ngolden retriever",
        lines=4,
        max_lines=12,
        elem_id="classes",
    )
    for button, (name, names) in zip(buttons, EXAMPLES.items(), strict=True):
        js = f"async () => [await usetta.example({json.dumps(name)}), {json.dumps(names)}]"
        button.click(None, None, [image, classes], js=js, show_progress="hidden")
    return image, classes
