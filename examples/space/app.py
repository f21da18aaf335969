"""A Gradio Space: an image and class names go in, the answers of several methods come out side by side.

Run it here with `pip install usetta gradio` and `python app.py`, or push this folder to a Space.
"""

import os
from typing import Any

import gradio as gr
from PIL import Image

from usetta import Classifier, load_model, methods

MODEL = load_model(os.environ.get("USETTA_MODEL", "ViT-B-16"))


def classify(image: Image.Image | None, text: str, chosen: list[str]) -> tuple[dict[str, float], list[list[Any]], Any]:
    """The probabilities by the last method, a row for each method, and what the last one did."""
    classes = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if image is None or len(classes) < 2 or not chosen:
        raise gr.Error("Give an image, at least two classes (one per line) and a method.")
    try:
        explanations = Classifier(classes, MODEL).compare(image, chosen)
    except ValueError as error:
        raise gr.Error(str(error)) from error
    rows = [
        [e.method, e.prediction.label, round(e.prediction.confidence, 3), e.prediction.reason] for e in explanations
    ]
    return dict(explanations[-1].prediction.ranked(6)), rows, explanations[-1].figure()


demo = gr.Interface(
    classify,
    inputs=[
        gr.Image(type="pil", label="Image"),
        gr.Textbox("tabby cat\ntiger cat\nEgyptian cat\nkitten", lines=4, label="Classes, one per line"),
        gr.CheckboxGroup(methods.names(), value=["clip", "se", "use"], label="Methods"),
    ],
    outputs=[
        gr.Label(label="Answer of the last method"),
        gr.Dataframe(headers=["method", "class", "probability", "why"], label="All methods"),
        gr.Plot(label="What the last method did"),
    ],
    title="usetta",
    description="CLIP-like models that classify images better at test time, without labels.",
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
