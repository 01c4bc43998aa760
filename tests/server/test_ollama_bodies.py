"""Ollama's words in the core's, without a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.server.http.errors import ApiError, make_body_error
from penstock.server.ollama.bodies import OllamaChat, OllamaEmbed, OllamaGenerate, OllamaOptions, parse_duration
from penstock.server.ollama.models import normalize_name
from penstock.server.openai.chat_body import ChatBody
from penstock.server.tgi.routes import TgiParameters

HI = [{"role": "user", "content": "hi"}]


def options(**values: Any) -> OllamaOptions:
    return OllamaOptions.model_validate(values)


def refusal(kind: Any, **values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(values)
    return make_body_error(caught.value).message


@pytest.mark.parametrize(
    "given, meant",
    [
        (300, 300.0),
        (0, 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("0", 0.0),
        ("90", 90.0),
        (-1, math.inf),
        ("-1m", math.inf),
        ("0s", 0.0),
    ],
)
def test_durations(given: float | str, meant: float) -> None:
    assert parse_duration(given) == pytest.approx(meant)


@pytest.mark.parametrize("given", ["soon", "5 m", "5mm", "m", "--5m", "5m!", "1e9h", math.nan])
def test_what_is_no_duration(given: float | str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(given)


def test_options_under_the_cores_names() -> None:
    asked = options(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.7,
        seed=7,
        stop=["a"],
        repeat_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        num_ctx=4096,
        mirostat=2,
    )
    assert asked.to_sampling() == {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.7,
        "seed": 7,
        "stop": ["a"],
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "mirostat": 2,
    }
    assert ChatBody.model_validate({**asked.to_sampling(), "messages": HI}).repetition_penalty == 1.1


def test_options_that_switch_something_off() -> None:
    assert options(seed=-1).to_sampling() == {}
    assert options(repeat_last_n=0, repeat_penalty=1.3).to_sampling() == {"repetition_penalty": 1.3, "repeat_last_n": 0}


def test_options_without_effect_are_told() -> None:
    idle = options(num_gpu=1, numa=False, tfs_z=0.5, penalize_newline=True, f16_kv=None).list_warnings(4096)
    assert idle == ["options have no effect: num_gpu, tfs_z, penalize_newline"]
    assert options(num_ctx=4096, temperature=0.5, mirostat=1).list_warnings(4096) == []
    assert (
        options(num_ctx=8192)
        .list_warnings(4096)[0]
        .startswith("num_ctx=8192 has no effect: the context length is 4096")
    )


@pytest.mark.parametrize(
    "num_predict, meant", [(None, None), (-1, None), (-2, None), (0, None), (5, 5), (100, 100), (101, None)]
)
def test_an_answer_ends_where_there_is_no_room(num_predict: int | None, meant: int | None) -> None:
    assert options(num_predict=num_predict).max_tokens(100) == meant


def test_refusals_name_the_field() -> None:
    assert refusal(OllamaChat, messages=HI, options={"temprature": 1}) == (
        "unknown parameter: 'options.temprature': did you mean 'temperature'?"
    )
    assert "options.repeat_penalty" in refusal(OllamaChat, messages=HI, options={"repeat_penalty": -1})
    assert "images are not supported" in refusal(OllamaChat, messages=[{**HI[0], "images": ["aGk="]}])
    assert "keep_alive" in refusal(OllamaChat, messages=HI, keep_alive="later")
    for name, value in {"template": "{{ .Prompt }}", "context": [1, 2], "images": ["aGk="]}.items():
        assert f"{name} is not supported" in refusal(OllamaGenerate, prompt="x", **{name: value})
    assert OllamaGenerate.model_validate({"prompt": "x", "suffix": "", "context": [], "images": None})
    assert refusal(OllamaEmbed) == "missing required parameter: 'input'"


def test_a_chat_in_openais_words() -> None:
    body = OllamaChat.model_validate(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *HI,
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "2", "tool_name": "add"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
            "format": {"type": "object"},
            "think": "low",
            "logprobs": True,
            "top_logprobs": 2,
        }
    )
    asked = ChatBody.model_validate(body.to_chat([message.to_openai() for message in body.messages], body.tools))
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool"]
    assert asked.messages[2].tool_calls and asked.messages[2].tool_calls[0].function.arguments == {"a": 1}
    assert asked.messages[3].name == "add"
    assert asked.tools and asked.tools[0].function.name == "add"
    assert asked.response_format and asked.response_format.json_schema
    assert asked.response_format.json_schema.schema_ == {"type": "object"}
    assert asked.reasoning_effort == "low" and asked.top_logprobs == 2


def test_generate_is_a_conversation_of_one() -> None:
    body = OllamaGenerate.model_validate({"prompt": "hi", "system": "Be brief.", "format": "json", "think": False})
    asked = ChatBody.model_validate(body.to_chat(body.messages()))
    assert [message.to_template()["content"] for message in asked.messages] == ["Be brief.", "hi"]
    assert asked.response_format and asked.response_format.type == "json_object"
    assert asked.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    "name, plain", [("smollm2:latest", "smollm2"), ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"), ("smollm2", "smollm2")]
)
def test_names(name: str, plain: str) -> None:
    assert normalize_name(name) == plain


def test_each_routes_error_shape() -> None:
    error = ApiError(400, "bad")
    assert error.response("/api/chat").body == b'{"error":"bad"}'
    assert b'"param"' in error.response("/v1/chat/completions").body
    for path in ("/", "/generate", "/generate_stream"):
        answer = error.response(path)
        assert (answer.status_code, answer.body) == (422, b'{"error":"bad","error_type":"validation"}')
    assert b'"overloaded"' in ApiError(503, "busy").response("/generate").body


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "other-apis.md").read_text()
    plain = {"model", "name", "stream", "prompt", "messages", "options", "input", "dimensions", "inputs", "parameters"}
    for kind in (OllamaOptions, OllamaChat, OllamaGenerate, OllamaEmbed, TgiParameters):
        for name in kind.model_fields.keys() - plain:
            assert f"`{name}`" in page or f".{name}`" in page, f"docs/other-apis.md does not name {name}"
