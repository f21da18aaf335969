"""From the body of a request, a multipart form or JSON, to options and images.

The body is in memory and within its limit already. Parsing a hostile body may still take a while, so all of this runs
in a thread. JSON is validated strictly (no number in quotes); a form holds nothing but strings, which are converted.
"""

import base64
import binascii
import re
from collections import defaultdict
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from usetta.images import ImageError
from usetta.serve.schemas import (
    ApiError,
    BatchRequest,
    ClassifyOptions,
    ClassifyRequest,
    CompareOptions,
    CompareRequest,
    invalid_request,
)

Options = TypeVar("Options", ClassifyOptions, CompareOptions)

JSON = "application/json"
FORM = "multipart/form-data"

_LISTS = ("methods", "templates")
_LONGEST_SOURCE = 255
_MOST_VALUES = 100_000
"""Values in JSON, counted by the characters that separate them, which texts may also contain."""
_SEPARATORS = (b",", b":", b"[", b"{")
_scan = JSONDecoder().raw_decode
_MOST_PARTS = 10_000
"""Parts of a form. Each takes far more time than its bytes are worth, so a body full of small ones stops here."""


@dataclass(frozen=True)
class Upload:
    """An image as it was sent."""

    source: str
    """What the caller calls it: the name of the file, or its position in the request."""
    field: str
    """Its position in the request."""
    content: bytes | str
    """The file, or its base64."""

    def file(self) -> bytes:
        """The file; ImageError if it is not valid base64."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            return base64.b64decode(self.content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(self.field, "not valid base64") from error


@dataclass(frozen=True)
class ParsedRequest(Generic[Options]):
    """A request whose body has been parsed."""

    options: Options
    uploads: tuple[Upload, ...]


def check_content_type(content_type: str, encoding: str) -> None:
    """Refuse a body of an unknown type before it is read."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (FORM, JSON):
        message = f"send {FORM} or {JSON}, not {kind[:100] or 'a body without a type'}"
        raise ApiError(415, "unsupported_media_type", message)
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, "unsupported_media_type", "send the body as it is, without a content encoding")


def read_one(
    content_type: str, body: bytes, options: type[Options], request: type[ClassifyRequest] | type[CompareRequest]
) -> ParsedRequest[Options]:
    """A request about one image: a form with `options`, or JSON as `request`, which adds the image to them."""
    try:
        if _is_form(content_type):
            return _from_form(content_type, body, options, "image", most=1)
        _check_json(body, request)
        one = request.model_validate_json(body, strict=True)
        return ParsedRequest(cast(Options, one), (Upload("image", "image", one.image),))
    except ValidationError as error:
        raise invalid_request(error) from None


def read_many(
    content_type: str, body: bytes, options: type[ClassifyOptions], request: type[BatchRequest], most: int
) -> ParsedRequest[ClassifyOptions]:
    """A request about several images, at most `most`."""
    try:
        if _is_form(content_type):
            return _from_form(content_type, body, options, "images", most)
        _check_json(body, request)
        many = request.model_validate_json(body, strict=True)
        fields = [f"images[{i}]" for i in range(len(many.images))]
        return ParsedRequest(many, tuple(map(Upload, fields, fields, many.images)))
    except ValidationError as error:
        raise invalid_request(error) from None


def _check_json(body: bytes, request: type[BaseModel]) -> None:
    """Refuse a body that would take long to read: with many values, or with keys that nobody asked for.

    The validator reads all of a body before it says what is wrong, and holds up every other thread meanwhile.
    """
    if sum(map(body.count, _SEPARATORS)) > _MOST_VALUES:
        raise ApiError(422, "invalid_request", f"the JSON has more than {_MOST_VALUES:,} values")
    try:
        text = body.decode()
        place = _end_of_space(text, 0)
        while text[place] in "{,":
            key, place = _scan(text, _end_of_space(text, place + 1))
            if not isinstance(key, str):
                return
            if key not in request.model_fields:
                raise ApiError(422, "invalid_request", f"{key[:100]}: Extra inputs are not permitted", field=key[:100])
            place = _after(":", text, _end_of_space(text, place))
            _, place = _scan(text, _end_of_space(text, place))
            place = _end_of_space(text, place)
    except (ValueError, IndexError, RecursionError):
        return  # not valid JSON, of which the validator says where


def _end_of_space(text: str, place: int) -> int:
    while text[place] in " \t\r\n":
        place += 1
    return place


def _after(character: str, text: str, place: int) -> int:
    if text[place] != character:
        raise ValueError
    return place + 1


def _is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == FORM


def _from_form(content_type: str, body: bytes, options: type[Options], name: str, most: int) -> ParsedRequest[Options]:
    fields, files = _parts(content_type, body)
    if name in fields:
        raise ApiError(422, "invalid_request", f"{name}: send it as a file, with a file name", field=name)
    for other in files.keys() - {name}:
        raise ApiError(422, "invalid_request", f"there is a file named {other[:100]!r}; send the image as {name!r}")
    sent = files.get(name, [])
    if not sent:
        raise ApiError(422, "invalid_request", f"{name}: no image was sent", field=name)
    if len(sent) > most:
        raise ApiError(
            422, "invalid_request", f"{name}: {len(sent)} were sent, more than the limit of {most}", field=name
        )
    names = [f"{name}[{i}]" for i in range(len(sent))] if name == "images" else [name]
    uploads = tuple(
        Upload(source or field, field, content) for field, (source, content) in zip(names, sent, strict=True)
    )
    return ParsedRequest(options.model_validate(_values(fields)), uploads)


def _values(fields: dict[str, list[str]]) -> dict[str, Any]:
    """A list is a repeated field; class names may also come one per line, so that a file of them can be a field."""
    values: dict[str, Any] = {}
    for name, given in fields.items():
        if name == "classes":
            lines = [line.strip() for value in given for line in re.split(r"\r\n|\r|\n", value)]
            values[name] = [line for line in lines if line]
        elif name in _LISTS:
            values[name] = given
        elif len(given) > 1:
            raise ApiError(422, "invalid_request", f"{name[:100]}: given {len(given)} times", field=name[:100])
        else:
            values[name] = given[0]
    return values


def _parts(content_type: str, body: bytes) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, bytes]]]]:
    """The fields of a form and its files with their names."""
    fields: dict[str, list[str]] = defaultdict(list)
    files: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
    parts, ended = 0, False

    def count() -> None:
        nonlocal parts
        parts += 1
        if parts > _MOST_PARTS:
            message = f"the form has more than {_MOST_PARTS:,} parts; send class names one per line, in one part"
            raise ApiError(422, "malformed_body", message)

    def on_field(part: Any) -> None:
        count()
        fields[_text(part.field_name)].append(_text(part.value or b""))

    def on_file(part: Any) -> None:
        count()
        source = (part.file_name or b"").decode("utf-8", "replace")[:_LONGEST_SOURCE]
        part.file_object.seek(0)
        files[_text(part.field_name)].append((source, part.file_object.read()))

    def on_end() -> None:
        nonlocal ended
        ended = True

    _, parameters = parse_options_header(content_type)
    in_memory = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}  # larger files would be written to the disk
    try:
        parser = FormParser(FORM, on_field, on_file, on_end, parameters.get(b"boundary"), config=in_memory)
        parser.write(body)
    except (FormParserError, UnicodeError) as error:
        raise ApiError(422, "malformed_body", "the form cannot be read: its parts are malformed") from error
    if not ended:
        raise ApiError(422, "malformed_body", "the form cannot be read: it ends before its last boundary")
    return fields, files


def _text(value: bytes) -> str:
    return value.decode("utf-8")
