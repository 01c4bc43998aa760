"""llama-server's own routes, fields and errors on a running server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.server.llama.embeddings import normalize_by
from tests.server.running import RunningServer

PROMPT = "The capital of France is"
HI = [{"role": "user", "content": "hi"}]


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=240)


def complete(server: RunningServer, **body: Any) -> Any:
    answer = post(server, "/completion", **{"temperature": 0, "n_predict": 2, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    text = post(server, "/completion", temperature=0, stream=True, **body).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion(server: RunningServer, path: str) -> None:
    answer = post(server, path, prompt=PROMPT, n_predict=2, temperature=-1, n_probs=3, return_tokens=True).json()
    assert (answer["content"], answer["prompt"], answer["stop_type"]) == (" Paris.", PROMPT, "limit")
    assert (answer["index"], answer["stop"], answer["truncated"], answer["has_new_line"]) == (0, True, False, False)
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], settings["n_probs"]) == (0, 2, 3)
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"] == 5
    assert len(answer["tokens"]) == len(answer["completion_probabilities"]) == timings["predicted_n"] == 2
    first = answer["completion_probabilities"][0]
    assert first["id"] == answer["tokens"][0] == first["top_logprobs"][0]["id"]
    assert first["token"] == " Paris" and bytes(first["bytes"]) == b" Paris" and first["logprob"] < 0
    assert len(first["top_logprobs"]) == 3


def test_tokens_are_shown_on_request(server: RunningServer) -> None:
    assert complete(server, prompt=PROMPT)["tokens"] == []


def test_probabilities_after_sampling(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "n_probs": 4, "post_sampling_probs": True, "n_predict": 3}
    greedy = complete(server, **body)["completion_probabilities"]
    for one in greedy:
        assert one["prob"] == 1 and [top["id"] for top in one["top_probs"]] == [one["id"]] and "logprob" not in one
    for one in complete(server, **{**body, "temperature": 2, "top_p": 1, "top_k": 3})["completion_probabilities"]:
        assert len(one["top_probs"]) == 3 and sum(top["prob"] for top in one["top_probs"]) == pytest.approx(1)
        assert one["prob"] in [top["prob"] for top in one["top_probs"]]


def test_the_rate_is_that_of_steps_after_the_first_token(server: RunningServer) -> None:
    one = complete(server, prompt=PROMPT, n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (1, 0, 0)
    four = complete(server, prompt=PROMPT, n_predict=4)["timings"]
    assert four["predicted_per_second"] == pytest.approx(3e3 / four["predicted_ms"])


def test_a_prompt_alone(server: RunningServer) -> None:
    answer = complete(server, prompt=PROMPT, n_predict=0, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)


def test_forms_of_a_prompt(server: RunningServer) -> None:
    ids = post(server, "/tokenize", content=PROMPT).json()["tokens"]
    mixed = [*ids[:2], " of France is"]
    several = complete(server, prompt=[PROMPT, ids, mixed, {"prompt_string": PROMPT}])
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert {one["content"] for one in several} == {" Paris."} and {one["prompt"] for one in several} == {PROMPT}
    for single in (ids, mixed, {"prompt_string": PROMPT}):
        assert complete(server, prompt=single)["content"] == " Paris."


def test_several_answers(server: RunningServer) -> None:
    answers = complete(server, prompt=[PROMPT, "One, two,"], n_cmpl=2)
    assert [one["index"] for one in answers] == [0, 1, 2, 3]
    assert answers[0]["content"] == answers[1]["content"] != answers[2]["content"]
    events = stream(server, prompt=[PROMPT, "One, two,"], n=2, n_predict=2)
    for index, answer in enumerate(answers):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in mine) == answer["content"] and mine[-1]["stop"] is True


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "it is empty"),
        ([[1], []], "the prompt is empty"),
        ([1, -2], "token id -2 is out of range"),
        ([1, {"prompt_string": "a"}], "an object is a whole prompt"),
        ({"prompt_string": "a", "multimodal_data": ["b"]}, "models here read text only"),
        ([1, *["a"] * 1025], "the limit is 1024"),
        (["a"] * 2049, "the limit is 2048"),
    ],
)
def test_prompts_that_are_refused(server: RunningServer, prompt: Any, words: str) -> None:
    answer = post(server, "/completion", prompt=prompt, n_predict=1)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400 and error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/completion", "/chat/completions"])
def test_a_prompt_too_long_tells_both_lengths(server: RunningServer, path: str) -> None:
    text = "word " * 3000
    answer = (
        post(server, path, prompt=text)
        if path == "/completion"
        else post(server, path, messages=[{"role": "user", "content": text}])
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 2048


def test_streams(server: RunningServer) -> None:
    whole = complete(server, prompt=PROMPT, n_predict=6)
    events = stream(server, prompt=PROMPT, n_predict=6, n_probs=1, timings_per_token=True)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    for event in events[:-1]:
        assert len(event["tokens"]) == len(event["completion_probabilities"]) >= 1
        assert event["timings"]["predicted_n"] == event["tokens_predicted"]
    assert events[-1]["stop_type"] == "limit" and events[-1]["generation_settings"]["stream"] is True
    assert "timings" not in stream(server, prompt=PROMPT, n_predict=2)[0]


def test_fields_are_chosen(server: RunningServer) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "nothing", "content/deeper"]
    answer = complete(server, prompt=PROMPT, response_fields=fields)
    assert answer == {"content": " Paris.", "generation_settings/n_predict": 2, "prompt": PROMPT}
    events = stream(server, prompt=PROMPT, n_predict=2, response_fields=["stop"])
    assert events[-1] == {"stop": True} and "content" in events[0]


def test_biases_of_texts(server: RunningServer) -> None:
    assert "Paris" not in complete(server, prompt=PROMPT, n_predict=8, logit_bias=[[" Paris", False]])["content"]
    assert "Paris" not in complete(server, prompt=PROMPT, n_predict=8, logit_bias={" Paris": -100})["content"]
    shown = complete(server, prompt=PROMPT, logit_bias=[["Hello world", 0.5]])["generation_settings"]["logit_bias"]
    assert len(shown) == 2 and {one["bias"] for one in shown} == {0.5}


def test_ignored_end_tokens_are_among_the_biases(server: RunningServer) -> None:
    [bias] = complete(server, prompt=PROMPT, ignore_eos=True)["generation_settings"]["logit_bias"]
    assert bias["bias"] is None and bias["token"] == 2


def test_a_seed_that_is_reported_gives_the_same_answer(server: RunningServer) -> None:
    body = {"prompt": "Once", "temperature": 1.5, "top_p": 1, "n_predict": 12}
    first = complete(server, **body, seed=4294967295)
    again = complete(server, **body, seed=first["generation_settings"]["seed"])
    assert first["content"] == again["content"]
    assert first["content"] != complete(server, **body, seed=4294967295)["content"]


def test_grammars(server: RunningServer) -> None:
    assert complete(server, prompt=PROMPT, n_predict=8, grammar='root ::= "a"{5,5}')["content"] == "aaaaa"
    assert complete(server, prompt=PROMPT, n_predict=8, json_schema={"const": "42"})["content"] == '"42"'


def test_stops(server: RunningServer) -> None:
    answer = complete(server, prompt=PROMPT, n_predict=8, stop=["."])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (" Paris", "word", ".")


def test_an_answer_that_takes_too_long_ends_after_a_line(server: RunningServer) -> None:
    body = {"prompt": "1\n2\n3\n", "n_predict": 400, "ignore_eos": True}
    answer = complete(server, **body, t_max_predict_ms=1)
    assert answer["stop_type"] == "limit" and answer["has_new_line"] and answer["tokens_predicted"] < 300
    events = stream(server, **body, t_max_predict_ms=1)
    assert [event["stop"] for event in events[-2:]] == [False, True] and events[-1]["stop_type"] == "limit"
    assert "\n" in "".join(event["content"] for event in events) and len(events) < 300
    line = complete(server, **body, t_max_predict_ms=1, grammar="root ::= [a-z]{40}")
    assert len(line["content"]) == 40


@pytest.mark.parametrize("field", ["n_indent", "min_keep"])
def test_fields_that_would_change_the_answer(server: RunningServer, field: str) -> None:
    error = post(server, "/completion", prompt=PROMPT, **{field: 2}).json()["error"]
    assert error["code"] == 400 and f"{field} is not supported" in error["message"]


def test_tokens_and_their_pieces(server: RunningServer) -> None:
    ids = post(server, "/tokenize", content="Hello 媽").json()["tokens"]
    pieces = post(server, "/tokenize", content="Hello 媽", with_pieces=True).json()["tokens"]
    assert [one["id"] for one in pieces] == ids and pieces[0]["piece"] == "Hello"
    spelled = [one["piece"] for one in pieces]
    assert any(isinstance(one, list) for one in spelled)
    assert b"".join(one.encode() if isinstance(one, str) else bytes(one) for one in spelled).decode() == "Hello 媽"
    assert post(server, "/detokenize", tokens=ids).json()["content"] == "Hello 媽"
    assert post(server, "/tokenize", content="").json() == {"tokens": []}


def test_control_tokens_may_be_text(server: RunningServer) -> None:
    text = "a<|im_end|>"
    special = post(server, "/tokenize", content=text).json()["tokens"]
    plain = post(server, "/tokenize", content=text, parse_special=False).json()["tokens"]
    assert 2 in special and 2 not in plain
    assert post(server, "/detokenize", tokens=plain).json()["content"] == text


def test_a_template_is_applied(server: RunningServer) -> None:
    prompt = post(server, "/apply-template", messages=HI).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    without = post(server, "/apply-template", messages=HI, add_generation_prompt=False).json()["prompt"]
    assert prompt == without + "<|im_start|>assistant\n"
    counted = post(server, "/chat/completions/input_tokens", messages=HI).json()["input_tokens"]
    assert counted == len(post(server, "/tokenize", content=prompt).json()["tokens"])
    answer = complete(server, prompt=prompt)
    chat = post(server, "/chat/completions", messages=HI, temperature=0, max_tokens=2).json()
    assert answer["content"] == chat["choices"][0]["message"]["content"]


def test_properties(server: RunningServer) -> None:
    found = httpx.get(f"{server.url}/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 2048 and found["total_slots"] == 64
    assert found["model_path"].endswith(".gguf") and "<|im_start|>" in found["chat_template"]
    assert (found["bos_token"], found["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    params = found["default_generation_settings"]["params"]
    assert params["temperature"] == complete(server, prompt="a", temperature=None)["generation_settings"]["temperature"]


def test_other_names_of_routes(server: RunningServer) -> None:
    for path, same in (("/v1/health", "/health"), ("/models", "/v1/models")):
        assert httpx.get(server.url + path).json() == httpx.get(server.url + same).json()
    answer = post(server, "/responses", input="hi", max_output_tokens=2).json()
    assert answer["object"] == "response"


def test_timings_in_every_chunk(server: RunningServer) -> None:
    for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
        text = post(server, path, **body, max_tokens=4, stream=True, timings_per_token=True).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
        assert counts[0] < counts[-1] == 4 and counts == sorted(counts) and len(counts) >= len(chunks) - 1
        begins = chunks[0]["choices"][0].get("delta", {})
        assert "role" not in begins or "timings" not in chunks[0]


def test_vectors_by_other_norms() -> None:
    vector = [0.6, -0.8]
    assert normalize_by(vector, 2) == vector
    assert normalize_by(vector, 0) == pytest.approx([0.75 * 32760, -32760])
    assert normalize_by(vector, 1) == pytest.approx([3 / 7, -4 / 7])
    assert sum(abs(value) ** 3 for value in normalize_by(vector, 3)) == pytest.approx(1)
