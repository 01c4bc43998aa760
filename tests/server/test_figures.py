"""What the server tells of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.running import RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def used(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(
        str(tiny_model), "--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny"
    ) as running:
        for _ in range(2):
            httpx.post(
                f"{running.url}/v1/completions",
                json={"prompt": list(range(20, 60)), "max_tokens": 8, "ignore_eos": True},
            )
        yield running


def samples(page: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line and not line.startswith("#")
    }


def test_metrics_count(used: RunningServer) -> None:
    import time

    time.sleep(1.5)  # the engine tells its figures once a second
    found = samples(httpx.get(f"{used.url}/metrics").text)
    assert found['penstock:generation_tokens_total{model_name="tiny",replica="0"}'] == 16
    assert found['penstock:prompt_tokens_total{model_name="tiny",replica="0"}'] == 80
    assert found['penstock:prefix_cache_hits_total{model_name="tiny",replica="0"}'] == 32
    assert found['penstock:request_success_total{finished_reason="length",model_name="tiny"}'] == 2
    assert found['penstock:time_to_first_token_seconds_count{model_name="tiny"}'] == 2
    assert found['penstock:request_generation_tokens_sum{model_name="tiny"}'] == 16
    engine = 'model_name="tiny",replica="0"'
    assert found[f"penstock:cache_hit_rate{{{engine}}}"] == 32 / 80
    assert found[f"penstock:token_usage{{{engine}}}"] == found[f"penstock:kv_cache_usage_perc{{{engine}}}"]
    phases = [
        found[f'penstock:startup_latency_breakdown_seconds{{model_name="tiny",phase="{phase}",replica="0"}}']
        for phase in ("imports", "config", "weights", "engine")
    ]
    assert all(phases) and sum(phases) <= found[f"penstock:weight_load_duration_seconds{{{engine}}}"]


def test_series_before_the_first_request_and_json_log(tiny_model: Path) -> None:
    flags = ("--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny", "--log-format", "json")
    with RunningServer(str(tiny_model), *flags) as running:
        found = samples(httpx.get(f"{running.url}/metrics").text)
        assert running.stop() == 0
    assert found['penstock:inter_token_latency_seconds_count{model_name="tiny"}'] == 0
    lines = [json.loads(line) for line in running.log]
    assert {"time", "level", "logger", "message"} <= set(lines[0])


def test_dashboard_asks_only_for_metrics_that_exist(used: RunningServer) -> None:
    text = json.dumps(json.loads((DEPLOY / "grafana.json").read_text()))
    asked = set(re.findall(r"penstock:\w+", text))
    assert len(asked) > 12
    used_names = {name.partition("{")[0] for name in samples(httpx.get(f"{used.url}/metrics").text)}
    there = used_names | set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{used.url}/metrics").text, re.M))
    for name in asked:
        assert name in there or name.removesuffix("_total") in there, name


def test_page_of_routes_needs_no_network(used: RunningServer) -> None:
    page = httpx.get(f"{used.url}/docs").text
    assert "http" not in re.sub(r"http-equiv", "", page).lower().replace("https://json-schema", "")
    for asset in re.findall(r'(?:src|href)="(/docs/[^"]+)"', page):
        assert httpx.get(used.url + asset).status_code == 200
    document = httpx.get(f"{used.url}/openapi.json").json()
    assert "messages" in document["components"]["schemas"]["ChatBody"]["properties"]


def test_info_says_why(used: RunningServer) -> None:
    info = httpx.get(f"{used.url}/info").json()
    settings = {one["name"]: one for one in info["models"][0]["settings"]}
    assert settings["threads"] == {"name": "threads", "value": 1, "why": "set by the user"}
    assert settings["max_model_len"]["why"]


def test_banner_and_idle_silence(used: RunningServer) -> None:
    assert any("kv_cache_tokens" in line for line in used.log)
    assert any("listening on" in line for line in used.log)
    named = [line.split()[1] for line in used.log]
    assert "threads" in named and "nnodes" not in named, "what nobody set is not listed"
    assert any("further settings have their defaults: /info lists them" in line for line in used.log)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.yaml", "model: {}\nload-format: dummy\nthreads: 1\nserved-model-name: filed\n"),
        pytest.param(
            "b.toml",
            'model = "{}"\nload_format = "dummy"\nthreads = 1\nserved_model_name = "filed"\n',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_config_file(tiny_model: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text.format(tiny_model))
    with RunningServer("--config", str(tmp_path / name)) as running:
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == "filed"


def test_idle_models_make_room(used: RunningServer, tiny_model: Path) -> None:
    arguments = (
        "--model",
        f"second={tiny_model}",
        "--model",
        f"third={tiny_model}",
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--served-model-name",
        "first",
        "--kv-cache-tokens",
        "4096",
    )
    model = httpx.get(f"{used.url}/info").json()["models"][0]
    num_tokens = next(one["value"] for one in model["settings"] if one["name"] == "kv_cache_tokens")
    cache = model["kv_cache_bytes"] * 4096 / num_tokens
    with RunningServer(str(tiny_model), *arguments, "--memory-budget-gb", str(2.5 * cache / 2**30)) as running:

        def ask(model: str) -> int:
            return httpx.post(
                f"{running.url}/v1/completions", timeout=120, json={"model": model, "prompt": [20, 21], "max_tokens": 2}
            ).status_code

        assert ask("second") == 200 and ask("third") == 200
        loaded = {one["id"]: one["loaded"] for one in httpx.get(f"{running.url}/v1/models").json()["data"]}
        assert loaded == {"first": True, "second": False, "third": True}


def test_parsers_that_may_be_named_exist() -> None:
    from penstock.server.config import REASONING_PARSERS, TOOL_CALL_PARSERS
    from penstock.text.chat.reasoning import REASONING
    from penstock.text.tools import TOOL_PARSERS

    assert set(TOOL_CALL_PARSERS) == set(TOOL_PARSERS) and set(REASONING_PARSERS) == set(REASONING)


@pytest.mark.slow
def test_several_models(tiny_model: Path, tmp_path: Path) -> None:
    with RunningServer(
        str(tiny_model),
        "--model",
        f"second={tiny_model}",
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--served-model-name",
        "first",
        "--keep-alive",
        "1",
    ) as running:

        def loaded() -> dict[str, bool]:
            return {one["id"]: one["loaded"] for one in httpx.get(f"{running.url}/v1/models").json()["data"]}

        assert loaded() == {"first": True, "second": False}
        answer = httpx.post(
            f"{running.url}/v1/completions",
            timeout=120,
            json={"model": "second", "prompt": [20, 21], "max_tokens": 2, "temperature": 0},
        )
        assert answer.status_code == 200 and answer.json()["model"] == "second"
        assert loaded()["second"]
        import time

        end = time.monotonic() + 15
        while loaded()["second"] and time.monotonic() < end:
            time.sleep(0.2)
        assert loaded() == {"first": True, "second": False}
        again = httpx.post(
            f"{running.url}/v1/completions",
            timeout=120,
            json={"model": "second", "prompt": [20, 21], "max_tokens": 2, "temperature": 0},
        )
        assert again.json()["choices"] == answer.json()["choices"]
