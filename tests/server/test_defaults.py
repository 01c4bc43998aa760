"""A first chat over the API, with no parameters, answers as `penstock run` does; /info says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli import main
from penstock.server.ollama.bodies import OLLAMA_DEFAULTS
from tests.server.running import RunningServer

QUESTION = "What is the capital of France?"


def ask(server: RunningServer, question: str, **body: Any) -> str:
    body |= {"messages": [{"role": "user", "content": question}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def told(server: RunningServer) -> dict[str, tuple[Any, str]]:
    defaults = httpx.get(f"{server.url}/info").json()["models"][0]["defaults"]
    return {one["name"]: (one["value"], one["why"]) for one in defaults}


def test_a_first_chat_answers_as_run_does(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2", "Name a color.", "--seed=11", "--json", "--max-tokens=30"]) == 0
    assert ask(server, "Name a color.", seed=11, max_tokens=30) == json.loads(capsys.readouterr().out)["text"]
    answers = [ask(server, QUESTION, max_tokens=30) for _ in range(6)]
    assert sum("Paris" in answer for answer in answers) >= 5


def test_info_and_the_banner_say_why(server: RunningServer) -> None:
    defaults = told(server)
    assert defaults["temperature"] == (0.2, "recommended for smollm2") and defaults["top_k"] == (0, "neutral")
    assert any("temperature" in line and "recommended for smollm2" in line for line in server.log)
    shown = httpx.post(f"{server.url}/api/show", json={"model": "smollm2"}).json()["parameters"].split()
    assert shown[shown.index("temperature") + 1] == "0.2"


def test_overrides_and_limits_hold_for_every_route(tiny_model: Path) -> None:
    options = [
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--override-generation-config",
        '{"max_new_tokens": 5, "top_k": 7}',
    ]
    with RunningServer(str(tiny_model), *options) as server:
        defaults = told(server)
        assert defaults["top_k"] == (7, "override_generation_config") and defaults["max_tokens"][0] == 5
        assert defaults["temperature"] == (1.0, "generation_config.json recommends none: neutral")
        shown = httpx.post(f"{server.url}/api/show", json={"model": str(tiny_model)}).json()["parameters"].split()
        values = {name: float(value) for name, value in zip(shown[::2], shown[1::2])}
        assert values["top_k"] == 7 and values["temperature"] == OLLAMA_DEFAULTS["temperature"]
        assert values["repeat_penalty"] == OLLAMA_DEFAULTS["repetition_penalty"]
        for asked in ({}, {"max_tokens": 3}, {"max_tokens": 50}):
            body = {"prompt": "the cat", "ignore_eos": True, "temperature": 0, **asked}
            usage = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
            assert usage["completion_tokens"] == min(5, asked.get("max_tokens", 16))
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "the", "max_tokens": 9, "min_tokens": 9})
        assert refused.status_code == 400 and "raise max_new_tokens" in refused.text
