"""Requests, answers and errors as callers see them; the OpenAPI document states the limits of this very server.

Every error has one shape, and never a stack trace:

    {"error": {"code": "too_large", "message": "the body is larger than ...", "field": "image"}}

`code` is for programs and does not change; `message` is for people, and is the library's own where it has one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, WrapValidator, create_model
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

from usetta.adaptive import ADAPTIVE, STAGES, Views
from usetta.rejection import Score
from usetta.serve.settings import Limits

EXAMPLE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEklEQVR42mP4X8EgJycHwkAWABt6A6Oa77sGAAAAAElFTkSuQmCC"
"""Of 2 x 2 pixels, so that the examples can be sent as they are."""
EXAMPLE_CLASSES = ["tabby cat", "red fox", "golden retriever"]


class ApiError(Exception):
    """What a caller gets instead of an answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        error_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.error_id = error_id
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The inside of the body."""
        values = {"code": self.code, "message": self.message, "field": self.field, "id": self.error_id}
        return {name: value for name, value in values.items() if value is not None}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse({"error": self.as_dict()}, status_code=self.status, headers=self.headers)


def invalid_request(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request; what was sent is not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = f"{field}: {first['msg']}" if field else first["msg"]
    return ApiError(422, "invalid_request", message, field=field or None)


class SharedOptions(BaseModel):
    """What to do with an image, whatever the method."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(description="Names of the classes to choose from.", examples=[EXAMPLE_CLASSES])
    model: str | None = Field(None, description="A name of `/v1/models`; by default the server's own.")
    views: Views = Field(
        ADAPTIVE,
        description="Views of the image, itself included; `adaptive`: up to "
        f"{STAGES[-1]}, but fewer where the first ones leave no doubt.",
    )
    augmix: bool = Field(False, description="AugMix on the strong views.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of the views.")
    templates: list[str] | None = Field(
        None, min_length=1, description="Texts with {} for the class name; several, or `ensemble`, are averaged."
    )
    top: int = Field(5, ge=1, description="How many classes are ranked in the answer.")
    reject_below: float | None = Field(
        None, ge=0, le=1, description="Reject answers whose score is lower: the image is none of the classes."
    )
    reject: Score = Field("confidence", description="The score, from 0 to 1, which is no doubt.")


class ClassifyOptions(SharedOptions):
    """What to do with an image by one method."""

    method: str = Field("se", description="A name of `/v1/methods`, also as `tpt+se` or `use:steps=2`.")
    session: str | None = Field(
        None,
        description="Where a method for streams, such as `tda`, remembers images: requests with the same session, "
        "method, model and classes share a memory. Such methods need a session, others take none.",
    )


class CompareOptions(SharedOptions):
    """What to do with an image by several methods."""

    methods: list[str] = Field(
        ["clip", "se", "use"], description="Names of `/v1/methods`, also as `tpt+se` or `use:steps=2`."
    )
    show_views: bool = Field(False, description="Whether the answer holds the views as small images.")


class ClassifyRequest(ClassifyOptions):
    """One image."""

    image: str = Field(description="An image file in base64.", json_schema_extra={"contentEncoding": "base64"})


class BatchRequest(ClassifyOptions):
    """Several images, one class list."""

    images: list[str] = Field(description="Image files in base64.")


class CompareRequest(CompareOptions):
    """One image, several methods."""

    image: str = Field(description="An image file in base64.", json_schema_extra={"contentEncoding": "base64"})


@dataclass(frozen=True)
class RequestSchemas:
    """The same with the limits of a server."""

    options: type[ClassifyOptions]
    one: type[ClassifyRequest]
    many: type[BatchRequest]
    compare_options: type[CompareOptions]
    compare: type[CompareRequest]


def request_schemas(limits: Limits) -> RequestSchemas:
    """What a server with these limits accepts."""
    text = Annotated[str, Field(min_length=1, max_length=limits.name_length)]
    plain = SharedOptions.model_fields
    shared: dict[str, Any] = {
        "classes": (Annotated[list[text], Field(min_length=1, max_length=limits.classes)], plain["classes"]),
        "model": (text | None, plain["model"]),
        "views": (_views_type(limits.views), plain["views"]),
        "templates": (Annotated[list[text] | None, Field(max_length=limits.templates)], plain["templates"]),
    }
    own = ClassifyOptions.model_fields
    one = shared | {"method": (text, own["method"]), "session": (text | None, own["session"])}
    images = Annotated[list[str], Field(min_length=1, max_length=limits.images)]
    many = one | {"images": (images, BatchRequest.model_fields["images"])}
    methods = Annotated[list[text], Field(min_length=1, max_length=limits.methods)]
    several = shared | {"methods": (methods, CompareOptions.model_fields["methods"])}
    return RequestSchemas(
        create_model("ClassifyOptions", __base__=ClassifyOptions, **one),
        create_model("ClassifyRequest", __base__=ClassifyRequest, **one),
        create_model("BatchRequest", __base__=BatchRequest, **many),
        create_model("CompareOptions", __base__=CompareOptions, **several),
        create_model("CompareRequest", __base__=CompareRequest, **several),
    )


def _views_type(most: int) -> Any:
    """A number of views up to `most`, or "adaptive".

    Not a union of two types, whose errors would speak of both and name neither field nor value well.
    """
    number = {"type": "integer", "minimum": 1, "maximum": most}
    schema = {"anyOf": [number, {"type": "string", "const": ADAPTIVE}]}
    return Annotated[int, Field(ge=1, le=most), WrapValidator(_number_or_adaptive), WithJsonSchema(schema)]


def _number_or_adaptive(value: Any, check_number: Callable[[Any], int]) -> Views:
    if value == ADAPTIVE:
        return ADAPTIVE
    try:
        return check_number(value)
    except ValidationError as error:
        if error.errors()[0]["type"] in ("greater_than_equal", "less_than_equal"):
            raise
        raise PydanticCustomError("views", "Input should be a valid integer, or 'adaptive'") from error


class RankedClass(BaseModel):
    """A class and its probability."""

    label: str
    probability: float


class Reasons(BaseModel):
    """How the answer came about."""

    reason: str = Field(description="In one plain sentence.")
    views: int = Field(description="How many views were used.")
    skipped: bool | None = Field(
        description="Whether tuning was left out because the views agree; null without tuning."
    )
    before: RankedClass | None = Field(description="The answer without tuning; null where the method tunes nothing.")
    tuned_on: list[int] = Field(description="Views that the loss was computed on; 0 is the image itself.")
    delta: float | None = Field(description="δ: share of the strong views that are less confident than the weak one.")
    beta: float | None = Field(description="β: weight of the weak view; null where each view has a weight of its own.")
    chosen_views: list[int] = Field(description="The most confident strong views, most confident first.")
    chosen_labels: list[str] = Field(description="The class that each of them chose before tuning.")
    entropies: list[float] = Field(description="Of each view's own prediction before tuning, in nats.")
    weights: list[float] = Field(description="Of each view in the answer; they sum to 1.")
    remembered: int | None = Field(
        description="Images that the session had learned from before this one; null for methods without one."
    )


_ANSWER: dict[str, Any] = {
    "source": "cat.jpg",
    "model": "ViT-B-16",
    "method": "use",
    "label": "tabby cat",
    "probability": 0.77,
    "rejected": None,
    "calibrated": None,
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
        "remembered": None,
    },
    "warnings": [],
}


class ImageAnswer(BaseModel):
    """The class of an image, and why."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ANSWER]})

    source: str = Field(description="The name of the uploaded file, or its position in the request.")
    model: str
    method: str
    label: str
    probability: float
    rejected: bool | None = Field(
        description="Whether `label` is only the closest class, as the image is probably none of them; null unless "
        "`reject_below` was given or the server has a calibration of this method."
    )
    calibrated: float | None = Field(
        description="The share of answers with this probability that are right; null unless the server has a "
        "calibration of this method."
    )
    ranked: list[RankedClass] = Field(description="The most probable classes.")
    zero_shot: RankedClass = Field(description="The answer of zero-shot CLIP: the image alone, nothing tuned.")
    why: Reasons
    warnings: list[str] = Field(description="Why the answer should not be trusted, if there are reasons.")


class ComparedAnswer(ImageAnswer):
    """What one of the methods says."""

    before_tuning: list[RankedClass] | None = Field(
        description="The most probable classes without tuning; null where the method tunes nothing."
    )
    beta_range: tuple[float, float] | None = Field(
        description="The least and the largest weight β; null where β does not depend on the image."
    )


class ViewAnswer(BaseModel):
    """What the model sees in a view by itself, before tuning."""

    label: str
    entropy: float = Field(description="In nats; 0 is confident.")
    image: str | None = Field(description="The view as a data URL (JPEG); null unless `show_views`.")


class CompareAnswer(BaseModel):
    """What several methods say about one image, from one encoding of its views."""

    answers: list[ComparedAnswer] = Field(description="In the order of `methods`.")
    views: list[ViewAnswer] = Field(description="By their number; 0 is the image itself.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="For programs.", examples=["unreadable_image"])
    message: str = Field(description="For people.", examples=["image: file is truncated"])
    field: str | None = Field(None, description="The part of the request that is wrong.", examples=["image"])
    id: str | None = Field(None, description="For an internal error: the id to search for in the server's log.")


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class BadImage(ErrorBody):
    """An image of a batch that cannot be read."""

    source: str


class BatchAnswer(BaseModel):
    """An answer or an error for each image, in the order they were sent."""

    answers: list[ImageAnswer | BadImage]


class MethodInfo(BaseModel):
    """A method and what it does."""

    name: str
    description: str


class MethodList(BaseModel):
    """What `method` may be: a name, `NAME+READOUT`, `NAME:SETTING=VALUE`."""

    methods: list[MethodInfo]
    readouts: list[str]


class ServedModel(BaseModel):
    """A model that this server has loaded."""

    name: str
    default: bool = Field(description="Whether it answers requests that name none.")
    image_size: int = Field(description="Side of its views in pixels.")


class ServedModelList(BaseModel):
    """What `model` may be, and the limits of this server."""

    models: list[ServedModel]
    limits: Limits


class ForgottenSession(BaseModel):
    """What is left of a session."""

    forgotten: int = Field(description="Memories that the session had, one for each method, model and class list.")


class ServerStatus(BaseModel):
    """Whether the server is alive or ready."""

    status: str
