"""Drafts over HTTP: the same answers, told in the usage and the metrics."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.test_figures import samples

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from one to thirty in words, separated by commas."}],
    "temperature": 0,
    "max_tokens": 80,
}
PREFIX = "penstock:spec_decode_num_"


def answer(server: RunningServer, **more: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | more, timeout=120)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_prediction_changes_nothing_but_the_count(server: RunningServer) -> None:
    plain = answer(server)
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}], "no, " + text):
        found = answer(server, prediction={"type": "content", "content": content})
        assert found["choices"][0]["message"] == plain["choices"][0]["message"]
        details = found["usage"]["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 0 <= accepted < found["usage"]["completion_tokens"] and rejected >= 0
    assert answer(server, prediction={"type": "content", "content": ""})["choices"] == plain["choices"]
    long = answer(server, prediction={"type": "content", "content": "one, two, " * 20_000})
    assert long["choices"][0]["message"] == plain["choices"][0]["message"]


def test_an_engine_killed_among_drafts_loses_no_token(server: RunningServer) -> None:
    """Accepted drafts are kept by the API process like all tokens; the next engine goes on after them."""
    plain = answer(server, speculation=False, return_token_ids=True)["choices"][0]
    text = plain["message"]["content"]
    body = ASK | {
        "stream": True,
        "return_token_ids": True,
        "include_applied": True,
        "prediction": {"type": "content", "content": text},
    }
    ids: list[int] = []
    told: dict[str, Any] = {}
    killed = False
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            ids += event["choices"][0].get("token_ids") or []
            told = event.get("penstock", told)
            if len(ids) > 8 and not killed:
                os.kill(server.engine_pid(), signal.SIGKILL)
                killed = True
    assert killed and ids == plain["token_ids"]
    drafts = [one["value"] for one in told["applied"] if one["kind"] == "drafts"]
    assert all(0 <= one["accepted"] <= one["verified"] for one in drafts) and told["exact"] is True


def test_streams_tell_one_token_at_a_time(server: RunningServer) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=ASK | {"stream": True, "logprobs": True}, timeout=120
    ) as response:
        events = [line for line in response.iter_lines() if '"logprobs":{"content"' in line.replace(" ", "")]
    assert len(events) > 10 and all(line.count('"token"') == 1 for line in events if '"top_logprobs":[]' in line)


@pytest.mark.parametrize(
    "prediction", [{"type": "audio", "content": "x"}, {"type": "content"}, {"type": "content", "content": 5}, "x"]
)
def test_what_is_no_prediction_is_refused(server: RunningServer, prediction: Any) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"prediction": prediction}, timeout=60)
    assert response.status_code == 400 and "prediction" in response.json()["error"]["message"]


def test_metrics(server: RunningServer) -> None:
    answer(server)
    time.sleep(1.5)  # the engine tells its figures once a second
    found = {
        name: value
        for name, value in samples(httpx.get(f"{server.url}/metrics").text).items()
        if name.startswith(PREFIX)
    }
    totals = {name.removeprefix(PREFIX).split("_total")[0]: value for name, value in found.items()}
    assert totals["accepted_tokens"] <= totals["draft_tokens"] and totals["drafts"] <= totals["draft_tokens"]
    assert sum('position="' in name for name in found) % 8 == 0 and len(found) >= 11
    of_drafters = [value for name, value in found.items() if name.startswith(f"{PREFIX}draft_tokens_per_drafter")]
    assert of_drafters and sum(of_drafters) == totals["draft_tokens"]
