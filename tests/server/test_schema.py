"""Every route with the data that the server's own OpenAPI document allows, and with data that it forbids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Ok

from tests.llm import tiny
from tests.server.running import RunningServer
from tests.server.shapes import check_answer

NUM_EXAMPLES = 2
MOST_EXAMPLES = 1500
POOLING = ("embed", "encode", "score", "rerank")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)

# a body on an embedding model that comes as far as its answer: the test below would be hollow without one
EMBEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "base64", "dimensions": 4}),
    ("/score", {"text_1": "one", "text_2": ["two", "three"]}),
    ("/rerank", {"query": "one", "documents": ["two", {"text": "three"}], "top_n": 1}),
    ("/rerank", {"query": "one", "texts": ["two", "three"], "top_n": 1, "return_text": True}),
    ("/embedding", {"content": ["one", [7, "two"]], "embd_normalize": 1}),
    ("/encode", {"text": ["one", "two"]}),
]


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Iterator[RunningServer]:
    """Answers are short, whatever a body asks for."""
    with RunningServer(
        str(tiny_model), "--load-format", "dummy", "--threads", "1", "--max-model-len", "128"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("encoder")
    tiny.write_config(folder, "BertModel", vocab_size=320)
    tiny.write_tokenizer(folder)
    with RunningServer(str(folder), "--load-format", "dummy", "--threads", "1") as running:
        yield running


def ask(client: httpx.Client, operation: APIOperation, mode: GenerationMode, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Case) -> None:
        made = case.as_transport_kwargs(base_url=str(client.base_url))
        content = {"json": made["json"]} if "json" in made else {"content": made.get("data")}
        answer = client.request(
            made["method"], made["url"], headers=dict(made["headers"] or {}), params=made.get("params"), **content
        )
        check_answer(operation.path, answer)

    one()


def exchange(server: RunningServer, mode: GenerationMode, num_examples: int, subtests: Any, *, pooling: bool) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = []
    for result in document.get_all_operations():
        assert isinstance(result, Ok), result
        operations.append(result.ok())
    chosen = [one for one in operations if one.body and pooling == any(word in one.path for word in POOLING)]
    assert len(chosen) >= 4
    with httpx.Client(base_url=server.url, timeout=240) as client:
        for operation in chosen:
            with subtests.test(operation.path):
                ask(client, operation, mode, num_examples)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert httpx.get(f"{server.url}/info").json()["models"][0].get("num_restarts", 0) == 0
    assert not [line for line in server.log if "Traceback" in line], "\n".join(server.log[-50:])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_generating_routes(generator: RunningServer, mode: GenerationMode, subtests: Any) -> None:
    exchange(generator, mode, NUM_EXAMPLES, subtests, pooling=False)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_embedding_routes(encoder: RunningServer, mode: GenerationMode, subtests: Any) -> None:
    exchange(encoder, mode, NUM_EXAMPLES, subtests, pooling=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_generating_routes_at_length(generator: RunningServer, mode: GenerationMode, subtests: Any) -> None:
    exchange(generator, mode, MOST_EXAMPLES, subtests, pooling=False)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_embedding_routes_at_length(encoder: RunningServer, mode: GenerationMode, subtests: Any) -> None:
    exchange(encoder, mode, MOST_EXAMPLES, subtests, pooling=True)


@pytest.mark.parametrize("path, body", EMBEDS, ids=[path for path, _ in EMBEDS])
def test_the_encoder_answers(encoder: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(encoder.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_the_document_is_right(generator: RunningServer) -> None:
    """What a client's author reads there: bodies, parameters of paths, streams, errors."""
    document = httpx.get(f"{generator.url}/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert chat["responses"]["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert [one["name"] for one in document["paths"]["/v1/models/{name}"]["get"]["parameters"]] == ["name"]
    schemas = document["components"]["schemas"]
    assert "functions" not in schemas["ChatBody"]["properties"]  # always refused
    assert "temperature" not in schemas["EmbeddingBody"]["properties"]  # without meaning there
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "4XX" in operation["responses"], f"{method} {path} does not say what its errors look like"
