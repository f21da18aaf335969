"""What the server says of itself in OpenAPI is true."""

from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve.conftest import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
"""Not that data of the right shape is accepted: hardly any string is an image in base64."""

WORK = ("/v1/compare", "/v1/classify", "/v1/classify/batch")


@pytest.fixture(scope="session")
def document(server: Running) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    return document


@pytest.fixture(scope="session")
def described(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_any_request_gets_an_answer_that_the_document_describes(described: Any, mode: GenerationMode) -> None:
    sent = []
    for result in described.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            in_a_form_everything_is_a_string = case.media_type == "multipart/form-data"
            checks = CHECKS if in_a_form_everything_is_a_string else [*CHECKS, negative_data_rejection]
            sent.append((case.operation.path, case.call_and_validate(checks=checks).status_code))

        with suppress(Unsatisfiable):  # there is nothing to get wrong about a request without a body
            send()
    assert {path for path, _status in sent} >= {*WORK}
    assert len(sent) >= 40


def test_the_examples_are_answered_as_they_are(server: Running, document: dict[str, Any]) -> None:
    for path in WORK:
        (example,) = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"].values()
        answer = httpx.post(server.url + path, json=example["value"])
        assert answer.status_code == 200, answer.text


def test_the_document_states_the_limits_of_the_server(document: dict[str, Any]) -> None:
    for path in WORK:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        for kind in ("application/json", "multipart/form-data"):
            fields = content[kind]["schema"]["properties"]
            assert (fields["classes"]["maxItems"], fields["classes"]["items"]["maxLength"]) == (1000, 200)
            assert fields["views"]["anyOf"][0]["maximum"] == 128
            assert fields["views"]["default"] == "adaptive"
            if path == "/v1/compare":
                assert fields["methods"]["maxItems"] == 16
    assert fields["images"]["items"] == {"type": "string", "format": "binary"}
    assert content["application/json"]["schema"]["properties"]["images"]["maxItems"] == 16


def test_an_answer_has_exactly_what_the_document_states(server: Running, document: dict[str, Any]) -> None:
    schemas, answer, comparison = document["components"]["schemas"], server.ask().json(), server.compare().json()
    for values, name in (
        (answer, "ImageAnswer"),
        (answer["why"], "Reasons"),
        (comparison, "CompareAnswer"),
        (comparison["views"][0], "ViewAnswer"),
    ):
        assert list(values) == list(schemas[name]["properties"])
    assert comparison["answers"][0].keys() == schemas["ComparedAnswer"]["properties"].keys()
    stated = document["paths"]["/v1/compare"]["post"]["responses"]["200"]["content"]
    assert stated.keys() == {"application/json", "text/event-stream"}


def test_every_error_has_the_one_shape(document: dict[str, Any]) -> None:
    described = 0
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status != "200":
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}
                    described += 1
    assert described >= 20
    assert document["components"]["schemas"]["ErrorDetail"]["required"] == ["code", "message"]
