"""SGLang's own routes and fields on a running server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

PROMPT = "The capital of France is"
HI = [{"role": "user", "content": "hi"}]
TWO = {"temperature": 0, "max_new_tokens": 2}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=240)


def generate(server: RunningServer, **body: Any) -> Any:
    answer = post(server, "/generate", **{"sampling_params": TWO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_one_prompt(server: RunningServer) -> None:
    answer = generate(server, text=PROMPT, rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == " Paris." and len(answer["output_ids"]) == 2
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 5, 2)
    assert meta["finish_reason"] == {"type": "length", "length": 2} and meta["e2e_latency"] > 0
    assert "input_token_logprobs" not in meta
    ids = post(server, "/tokenize", prompt=PROMPT).json()["tokens"]
    assert generate(server, input_ids=ids)["text"] == " Paris."


def test_a_batch_with_a_value_for_each(server: RunningServer) -> None:
    answers = generate(
        server,
        text=[PROMPT, "One, two,"],
        sampling_params=[TWO, {"temperature": 0, "max_new_tokens": 1}],
        return_logprob=[True, False],
        rid=["a", "b"],
    )
    assert [one["meta_info"]["id"] for one in answers] == ["a", "b"]
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [2, 1]
    assert ["output_token_logprobs" in one["meta_info"] for one in answers] == [True, False]


def test_several_answers_are_a_list(server: RunningServer) -> None:
    params = {"temperature": 0.5, "max_new_tokens": 3, "n": 3, "regex": "(Yes|No)"}
    answers = generate(server, text=PROMPT, sampling_params=params)
    assert len(answers) == 3 and all(one["text"] in ("Yes", "No") for one in answers)


def test_logprobs(server: RunningServer) -> None:
    body = {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    meta = generate(server, text=PROMPT, logprob_start_len=2, **body)["meta_info"]
    given, made = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert "".join(text for _, _, text in given) == " of France is"
    assert "".join(text for _, _, text in made) == " Paris."
    assert made == [top[0] for top in meta["output_top_logprobs"]]
    assert [len(top) for top in meta["input_top_logprobs"]] == [3, 3, 3]
    whole = generate(server, text=PROMPT, logprob_start_len=0, **body)["meta_info"]
    assert whole["input_token_logprobs"][2:] == given and whole["input_token_logprobs"][0][0] is None
    assert whole["input_top_logprobs"][0] is None
    plain = generate(server, text=PROMPT, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and plain["output_token_logprobs"][0][2] is None
    assert "output_top_logprobs" not in plain


def test_logprobs_of_given_tokens(server: RunningServer) -> None:
    ids = post(server, "/tokenize", prompt=" Paris London").json()["tokens"]
    meta = generate(server, text=PROMPT, return_logprob=True, token_ids_logprob=ids)["meta_info"]
    first, second = meta["output_token_ids_logprobs"]
    assert [id for _, id, _ in first] == [id for _, id, _ in second] == ids
    assert first[0] == meta["output_token_logprobs"][0] and first[0][0] > first[1][0]
    both = generate(server, text=[PROMPT, PROMPT], return_logprob=True, token_ids_logprob=[ids[:1], ids[1:]])
    assert [one["meta_info"]["output_token_ids_logprobs"][0] for one in both] == [first[:1], first[1:]]


def test_a_prompt_scored_alone_agrees_with_its_answer(server: RunningServer) -> None:
    made = generate(server, text=PROMPT, return_logprob=True, logprob_start_len=0)["meta_info"]
    ids = [id for _, id, _ in [*made["input_token_logprobs"], *made["output_token_logprobs"]]]
    score = generate(
        server, input_ids=ids, return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )
    assert (score["text"], score["output_ids"], score["meta_info"]["completion_tokens"]) == ("", [], 0)
    found = [logprob for logprob, _, _ in score["meta_info"]["input_token_logprobs"][made["prompt_tokens"] :]]
    assert found == pytest.approx([logprob for logprob, _, _ in made["output_token_logprobs"]], abs=1e-4)


def test_events_hold_the_answer_so_far(server: RunningServer) -> None:
    text = post(
        server, "/generate", text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 6}, stream=True
    ).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    whole = generate(server, text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 6})
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    for before, after in zip(events, events[1:]):
        assert after["text"].startswith(before["text"]) and before["meta_info"]["finish_reason"] is None
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    batch = post(server, "/generate", text=[PROMPT, "One,"], sampling_params=TWO, stream=True).text
    assert {json.loads(line[6:])["index"] for line in batch.split("\n\n") if line.startswith("data: {")} == {0, 1}


def test_what_ends_an_answer(server: RunningServer) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "stop": "."}
    answer = generate(server, text=PROMPT, sampling_params=params)
    assert answer["text"] == " Paris" and answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "."}
    kept = generate(server, text=PROMPT, sampling_params={**params, "no_stop_trim": True})
    assert kept["text"] == " Paris."
    chat = {"messages": HI, "temperature": 0, "max_tokens": 200, "regex": "Hi!"}
    [choice] = post(server, "/v1/chat/completions", **chat).json()["choices"]
    assert choice["message"]["content"] == "Hi!" and choice["finish_reason"] == "stop"


def test_matched_stop(server: RunningServer) -> None:
    def matched(path: str, **body: Any) -> Any:
        body = {"temperature": 0, **body}
        [choice] = post(server, path, **body).json()["choices"]
        text = post(server, path, **body, stream=True).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        [end] = [one for chunk in chunks for one in chunk["choices"] if one["finish_reason"] is not None]
        assert end["matched_stop"] == choice["matched_stop"]
        return choice["matched_stop"]

    chat, completions = "/v1/chat/completions", "/v1/completions"
    assert matched(completions, prompt=PROMPT, max_tokens=8, stop=".") == "."
    assert matched(completions, prompt=PROMPT, max_tokens=2) is None
    paris = post(server, "/tokenize", prompt=" Paris").json()["tokens"][0]
    assert matched(completions, prompt=PROMPT, max_tokens=8, stop_token_ids=[paris]) == paris
    assert matched(chat, messages=HI, max_tokens=300) == 2
    assert matched(chat, messages=HI, max_tokens=2) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "a", "input_ids": [1]}, "give text or input_ids"),
        ({"text": [], "sampling_params": TWO}, "the batch is empty"),
        ({"text": ["a", "b"], "rid": ["c"]}, "rid has 1 entries for 2 prompts"),
        ({"text": ["a", "b"], "lora_path": ["c", None]}, "the prompts of a batch use one adapter"),
        ({"text": "a", "token_ids_logprob": [[1]]}, "a flat list of integers"),
        ({"text": "a", "token_ids_logprob": [1], "top_logprobs_num": 2}, "exclude each other"),
        ({"text": "a", "inputs": "b"}, "give inputs, or text or input_ids"),
    ],
)
def test_bodies_that_are_refused(server: RunningServer, body: dict[str, Any], words: str) -> None:
    answer = post(server, "/generate", **body)
    assert answer.status_code == 422 and words in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"image_data": "b"}, "models here read text only"),
        ({"return_logprob": True, "token_ids_logprob": [2_000_000]}, "out of range"),
        ({"sampling_params": {"max_tokens": 3}}, "give max_new_tokens"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf each constrain"),
        ({"top_logprobs_num": -1}, "greater than or equal to 0"),
    ],
)
def test_errors_of_its_fields_look_like_openais(server: RunningServer, body: dict[str, Any], words: str) -> None:
    answer = post(server, "/generate", text="a", **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_several_texts_are_tokenized(server: RunningServer) -> None:
    one, two = (post(server, "/v1/tokenize", prompt=text).json()["tokens"] for text in ("One, two", ""))
    several = post(server, "/tokenize", prompt=["One, two", ""]).json()
    assert several["tokens"] == [one, two] and several["count"] == [len(one), 0]
    tools = [{"type": "function", "function": {"name": "look"}}]
    plain, with_tools = (post(server, "/tokenize", messages=HI, tools=some).json()["count"] for some in ([], tools))
    without = post(server, "/tokenize", messages=HI, tools=tools, tool_choice="none").json()["count"]
    assert without == plain < with_tools
    ids = [1, *one, 2]
    assert post(server, "/v1/detokenize", tokens=ids, skip_special_tokens=True).json()["text"] == "One, two"
    assert post(server, "/detokenize", tokens=ids).json()["text"] == "<|im_start|>One, two<|im_end|>"


def test_errors_of_a_request_look_like_openais(server: RunningServer) -> None:
    answer = post(server, "/generate", text="word " * 3000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "is longer than the model's context length of 2048" in answer.json()["error"]["message"]
    answer = post(server, "/generate", text="a", lora_path="none")
    assert answer.status_code == 404 and "none" in answer.json()["error"]["message"]


def test_constraints_in_chats(server: RunningServer) -> None:
    def content(**body: Any) -> Any:
        answer = post(server, "/v1/chat/completions", messages=HI, max_tokens=16, temperature=0, **body).json()
        return answer["choices"][0]["message"]["content"]

    assert content(ebnf='root ::= "Hello" | "Hey"') in ("Hello", "Hey")
    assert content(regex="[0-9]{3}").isdigit()
    refused = post(server, "/v1/chat/completions", messages=HI, regex="a", ebnf="b")
    assert refused.status_code == 400 and "each constrain" in refused.json()["error"]["message"]


def test_what_server_and_model_are(server: RunningServer) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = httpx.get(server.url + path).json()
        assert found["is_generation"] is True and found["model_path"] == "smollm2"
    for path in ("/get_server_info", "/server_info"):
        assert httpx.get(server.url + path).json()["max_model_len"] == 2048
    assert httpx.get(f"{server.url}/health_generate").status_code == 200


def test_the_cache_is_flushed(server: RunningServer) -> None:
    prompt = "Flushed prefixes are computed again, all of their tokens, from the very first one on."
    assert generate(server, text=prompt)["meta_info"]["cached_tokens"] == 0
    assert generate(server, text=prompt)["meta_info"]["cached_tokens"] > 0
    assert post(server, "/flush_cache").status_code == 200
    assert generate(server, text=prompt)["meta_info"]["cached_tokens"] == 0


def test_flushing_is_for_the_admin(keeping: RunningServer) -> None:
    for key, status in (("one", 403), ("root", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.post(f"{keeping.url}/flush_cache", headers=headers).status_code == status
    shown = httpx.get(f"{keeping.url}/server_info", headers={"Authorization": "Bearer one"}).json()
    assert set(shown) == {"version", "served_model_name"}
