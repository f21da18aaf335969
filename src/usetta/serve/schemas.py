"""Requests and answers as the OpenAPI document tells them; the limits of this very server are part of it."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from usetta.serve.settings import Limits

EXAMPLE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEklEQVR42mP4X8EgJycHwkAWABt6A6Oa77sGAAAAAElFTkSuQmCC"
"""Of 2 x 2 pixels, so that the examples can be sent as they are."""
EXAMPLE_CLASSES = ["tabby cat", "red fox", "golden retriever"]


class Options(BaseModel):
    """What to do with an image."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(description="Names of the classes to choose from.", examples=[EXAMPLE_CLASSES])
    method: str = Field("se", description="A name of `/v1/methods`, also as `tpt+se` or `use:steps=2`.")
    model: str | None = Field(None, description="A name of `/v1/models`; by default the server's own.")
    views: int = Field(64, ge=1, description="Views of the image, itself included.")
    augmix: bool = Field(False, description="AugMix on the strong views.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of the views.")
    templates: list[str] | None = Field(
        None, min_length=1, description="Texts with {} for the class name; several, or `ensemble`, are averaged."
    )
    top: int = Field(5, ge=1, description="How many classes are ranked in the answer.")


class ClassifyRequest(Options):
    """One image."""

    image: str = Field(description="An image file in base64.", json_schema_extra={"contentEncoding": "base64"})


class BatchRequest(Options):
    """Several images, one class list."""

    images: list[str] = Field(description="Image files in base64.")


@dataclass(frozen=True)
class Requests:
    """The same with the limits of a server."""

    options: type[Options]
    one: type[ClassifyRequest]
    many: type[BatchRequest]


def requests(limits: Limits) -> Requests:
    """What a server with these limits takes."""
    text = Annotated[str, Field(min_length=1, max_length=limits.name_length)]
    plain = Options.model_fields
    own: dict[str, Any] = {
        "classes": (Annotated[list[text], Field(min_length=1, max_length=limits.classes)], plain["classes"]),
        "method": (text, plain["method"]),
        "model": (text | None, plain["model"]),
        "views": (
            Annotated[int, Field(ge=1, le=limits.views)],
            Field(min(plain["views"].default, limits.views), description=plain["views"].description),
        ),
        "templates": (Annotated[list[text] | None, Field(max_length=limits.templates)], plain["templates"]),
    }
    images = Annotated[list[str], Field(min_length=1, max_length=limits.images)]
    return Requests(
        create_model("Options", __base__=Options, **own),
        create_model("ClassifyRequest", __base__=ClassifyRequest, **own),
        create_model(
            "BatchRequest", __base__=BatchRequest, **own, images=(images, BatchRequest.model_fields["images"])
        ),
    )


class Ranked(BaseModel):
    """A class and its probability."""

    label: str
    probability: float


class Why(BaseModel):
    """How the answer came about."""

    reason: str = Field(description="In one plain sentence.")
    views: int = Field(description="How many views were looked at.")
    skipped: bool | None = Field(
        description="Whether tuning was left out because the views agree; null without tuning."
    )
    before: Ranked | None = Field(description="The answer without tuning; null where the method tunes nothing.")
    tuned_on: list[int] = Field(description="Views that the loss looked at; 0 is the image itself.")
    delta: float | None = Field(description="δ: share of the strong views that are less confident than the weak one.")
    beta: float | None = Field(description="β: weight of the weak view; null where views are weighed one by one.")
    chosen_views: list[int] = Field(description="The most confident strong views, most confident first.")
    chosen_labels: list[str] = Field(description="The class that each of them chose before tuning.")
    entropies: list[float] = Field(description="Of each view's own prediction before tuning, in nats.")
    weights: list[float] = Field(description="Of each view in the answer; they sum to 1.")


_ANSWER: dict[str, Any] = {
    "source": "cat.jpg",
    "model": "ViT-B-16",
    "method": "use",
    "label": "tabby cat",
    "probability": 0.77,
    "ranked": [{"label": "tabby cat", "probability": 0.77}, {"label": "red fox", "probability": 0.23}],
    "zero_shot": {"label": "red fox", "probability": 0.51},
    "why": {
        "reason": "tuned: tabby cat 49.7% -> 77.0%",
        "views": 4,
        "skipped": False,
        "before": {"label": "tabby cat", "probability": 0.497},
        "tuned_on": [0, 3],
        "delta": 0.333333,
        "beta": 0.433333,
        "chosen_views": [3],
        "chosen_labels": ["tabby cat"],
        "entropies": [0.69, 0.71, 0.68, 0.4],
        "weights": [0.433333, 0.0, 0.0, 0.566667],
    },
}


class Answer(BaseModel):
    """The class of an image, and why."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ANSWER]})

    source: str = Field(description="The name of the uploaded file, or its place in the request.")
    model: str
    method: str
    label: str
    probability: float
    ranked: list[Ranked] = Field(description="The most probable classes.")
    zero_shot: Ranked = Field(description="What the image alone says, untuned.")
    why: Why


class Problem(BaseModel):
    """What went wrong."""

    code: str = Field(description="For programs.", examples=["unreadable_image"])
    message: str = Field(description="For people.", examples=["image: file is truncated"])
    field: str | None = Field(None, description="The part of the request that is to blame.", examples=["image"])
    id: str | None = Field(None, description="What to look for in the server's log, of an error that is its own.")


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: Problem


class BadImage(ErrorBody):
    """What stands in the place of an image that cannot be read."""

    source: str


class BatchAnswer(BaseModel):
    """An answer or an error for each image, in the order they were sent."""

    answers: list[Answer | BadImage]


class Method(BaseModel):
    """A method by its name."""

    name: str
    description: str


class Methods(BaseModel):
    """What `method` may be: a name, `NAME+READOUT`, `NAME:SETTING=VALUE`."""

    methods: list[Method]
    readouts: list[str]


class ServedModel(BaseModel):
    """A model that this server has loaded."""

    name: str
    default: bool = Field(description="Whether it answers requests that name none.")
    image_size: int = Field(description="Side of its views in pixels.")


class ServedModels(BaseModel):
    """What `model` may be."""

    models: list[ServedModel]


class State(BaseModel):
    """A word on how the server is."""

    status: str
