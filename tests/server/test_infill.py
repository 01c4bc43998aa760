"""Filling in by every API, on a model without a chat template, which is given one as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from penstock.server.catalog import make_catalog
from penstock.server.config import ServerConfig
from penstock.server.http.keys import make_ring
from tests.llm import tiny
from tests.server.running import RunningServer

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}<end>[{{ message.role }}]"
    "{{ message.content }}{% endfor %}<tool_call>"
)
FEW = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "given.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Iterator[RunningServer]:
    """Its weights are random. The tokens for filling in are not special, as Qwen's are not."""
    folder = tmp_path_factory.mktemp("coder")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=256)
    tiny.write_tokenizer(folder, template=None)
    made = tiny.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made.save(str(folder / "tokenizer.json"))
    with RunningServer(
        str(folder),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--served-model-name",
        "coder",
        "--chat-template",
        str(template),
    ) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def prompt_of(server: RunningServer, **body: Any) -> str:
    return str(post(server, "/infill", n_predict=1, **body).json()["prompt"])


def test_completions_with_a_suffix(coder: RunningServer) -> None:
    answer = post(coder, "/v1/completions", prompt="the cat", suffix="the mat", return_token_ids=True, **FEW).json()
    raw = "<|fim_prefix|>the cat<|fim_suffix|>the mat<|fim_middle|>"
    same = post(coder, "/v1/completions", prompt=raw, return_token_ids=True, **FEW).json()
    [choice], [other] = answer["choices"], same["choices"]
    assert choice["prompt_token_ids"] == other["prompt_token_ids"] and choice["text"] == other["text"]
    several = post(coder, "/v1/completions", prompt=["a", "b"], suffix="c", **FEW).json()
    assert [one["index"] for one in several["choices"]] == [0, 1]


def test_what_the_texts_spell_is_text(coder: RunningServer) -> None:
    body = {"prompt": "a<|fim_middle|><end>", "suffix": "<|fim_prefix|>", "return_token_ids": True}
    [choice] = post(coder, "/v1/completions", **body, **FEW).json()["choices"]
    marks = [id for id in choice["prompt_token_ids"] if id == 0 or id >= 300]
    assert marks == [300, 301, 302]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1, 2], "suffix": "x"}, "suffix needs a text prompt"),
        ({"prompt": "a", "suffix": "x", "echo": True}, "echo is not supported with a suffix"),
        ({"prompt": ["a"] * 65, "suffix": "x"}, "the limit is 64"),
        ({"prompt": "cat " * 100, "suffix": "mat " * 200, "max_tokens": 1}, "tokens"),
    ],
)
def test_completions_refuse(coder: RunningServer, body: dict[str, Any], words: str) -> None:
    answer = post(coder, "/v1/completions", **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_completions_cut_what_is_far_from_the_gap(coder: RunningServer) -> None:
    body = {"prompt": "cat " * 100 + "BEFORE", "suffix": "AFTER" + " mat" * 200, "truncate_prompt_tokens": 64}
    answer = post(coder, "/v1/completions", return_token_ids=True, **body, **FEW).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    text = post(coder, "/detokenize", tokens=ids).json()["prompt"]
    assert len(ids) <= 64 and "BEFORE<|fim_suffix|>AFTER" in text and text.startswith("<|fim_prefix|>")


def test_ollama_inserts(coder: RunningServer) -> None:
    options = {"temperature": 0, "num_predict": 4}
    answer = post(
        coder, "/api/generate", model="coder", prompt="the cat", suffix="the mat", stream=False, options=options
    ).json()
    raw = "<|fim_prefix|>the cat<|fim_suffix|>the mat<|fim_middle|>"
    same = post(coder, "/api/generate", model="coder", prompt=raw, raw=True, stream=False, options=options).json()
    assert answer["response"] == same["response"] and answer["prompt_eval_count"] == same["prompt_eval_count"]
    assert "insert" in post(coder, "/api/show", model="coder").json()["capabilities"]


def test_infill(coder: RunningServer) -> None:
    body = {"input_prefix": "the ", "prompt": "cat", "input_suffix": "the mat", "n_predict": 4, "temperature": 0}
    answer = post(coder, "/infill", **body, n_probs=2, return_tokens=True).json()
    [same] = post(coder, "/v1/completions", prompt="the cat", suffix="the mat", **FEW).json()["choices"]
    assert answer["content"] == same["text"] and answer["stop"] is True and answer["model"] == "coder"
    assert answer["prompt"] == "<|fim_prefix|>the cat<|fim_suffix|>the mat<|fim_middle|>"
    assert answer["tokens_predicted"] == len(answer["tokens"]) == len(answer["completion_probabilities"])
    assert answer["stop_type"] in ("limit", "eos") and answer["timings"]["predicted_n"] == answer["tokens_predicted"]
    first = answer["completion_probabilities"][0]
    assert first["id"] == answer["tokens"][0] == first["top_logprobs"][0]["id"] and len(first["top_logprobs"]) == 2


def test_infill_streams(coder: RunningServer) -> None:
    body = {"input_prefix": "the cat", "input_suffix": "the mat", "n_predict": 6, "temperature": 0}
    whole = post(coder, "/infill", **body).json()
    lines = post(coder, "/infill", **body, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    assert events[-1]["content"] == "" and events[-1]["stop_type"] == whole["stop_type"]


def test_infill_reads_other_files_and_keeps_the_nearest(coder: RunningServer) -> None:
    files = [{"filename": "one.py", "text": "one", "time": 7}, {"text": "two"}]
    assert prompt_of(coder, input_prefix="a", input_suffix="b", input_extra=files) == (
        "<|repo_name|>myproject\n<|file_sep|>one.py\none<|file_sep|>tmp\ntwo<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    files = [{"text": "x " * 500_000}]
    long = prompt_of(coder, input_prefix="1" * 10**6 + "BEFORE", input_suffix="AFTER " * 10**5, input_extra=files)
    assert "BEFORE<|fim_suffix|>AFTER " in long


def test_infill_warms_the_cache_without_a_word(coder: RunningServer) -> None:
    """As editors do before the first key is pressed."""
    body = {
        "input_prefix": "warm " * 20,
        "input_suffix": "b",
        "n_predict": 0,
        "samplers": ["top_k", "top_p", "infill"],
        "t_max_predict_ms": 1,
    }
    answer = post(coder, "/infill", **body)
    assert answer.status_code == 200 and answer.json()["content"] == "" and answer.json()["tokens_predicted"] == 0
    assert post(coder, "/infill", **{**body, "n_predict": 1}).json()["timings"]["cache_n"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": "a", "input_suffix": "b", "n": 2}, "n=2"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x"}]}, "input_extra"),
        ({"input_prefix": "a", "input_suffix": "b", "n_predict": -3}, "n_predict"),
    ],
)
def test_infill_refuses(coder: RunningServer, body: dict[str, Any], words: str) -> None:
    answer = post(coder, "/infill", **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, None),
    ],
)
def test_a_model_without_the_tokens_says_so(
    server: RunningServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400 and "does not support insert" in answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_the_given_template_makes_it_a_chat_model(coder: RunningServer, template: Path) -> None:
    [card] = httpx.get(coder.url + "/v1/models").json()["data"]
    assert card["kind"] == "chat"
    body = {"messages": [{"role": "user", "content": "hi <end>"}]}
    tokens = post(coder, "/tokenize", **body).json()["tokens"]
    assert post(coder, "/detokenize", tokens=tokens).json()["prompt"] == "<end>[user]hi <end><tool_call>"
    assert tokens.count(0) == 1, "a message's control token is text"
    assert post(coder, "/v1/chat/completions", **body, max_tokens=2).status_code == 200
    [model] = httpx.get(coder.url + "/info").json()["models"]
    [setting] = [one for one in model["settings"] if one["name"] == "chat_template"]
    assert setting["value"] == str(template) and setting["why"] == "set by the user"
    assert "tools" in post(coder, "/api/show", model="coder").json()["capabilities"]


def test_a_wrong_template_ends_the_server_before_it_starts(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text("{% if %}")
    with (
        pytest.raises(RuntimeError, match=r"is not a Jinja template: line 1"),
        RunningServer("no/such-model", "--chat-template", str(wrong)),
    ):
        pass


def test_of_several_models_the_first_one_gets_the_template(tmp_path: Path) -> None:
    config = ServerConfig()
    catalog = make_catalog({"one": "a", "two": "b"}, {"chat_template": TEMPLATE}, config, make_ring(config), tmp_path)
    assert [model._template for model in catalog] == [TEMPLATE, None]
