"""Flags of `vllm serve`: taken where they change nothing, refused otherwise, and never in the help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.commands.flags.config_file import VllmFlags
from penstock.config import EngineConfig

TAKEN = [
    "--tensor-parallel-size",
    "1",
    "--trust-remote-code",
    "--disable-log-requests",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--dtype",
    "half",
    "--swap-space",
    "4",
    "--enable-chunked-prefill",
    "--no-enable-lora",
    "--max_num_seqs",
    "8",
    "--distributed-executor-backend",
    "mp",
    "--uvicorn-log-level",
    "warning",
    "--api-server-count",
    "1",
    "--task",
    "embed",
    "--hf-overrides",
    "{}",
    "--structured-outputs-config.backend",
    "xgrammar",
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def serve(*given: Any) -> int:
        calls.append(given)
        return 0

    monkeypatch.setattr("penstock.server.run.serve", serve)
    return calls


def test_taken(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "smollm2", *TAKEN]) == 0
    kept = {"tensor_parallel_size": 1, "distributed_executor_backend": "mp"}
    assert served[0][1] == {"dtype": "float16", "max_num_seqs": 8, "enable_lora": False, **kept}
    said = capsys.readouterr().err
    assert "trust_remote_code=True has no effect: a checkpoint's code is never run" in said
    assert "task='embed' has no effect: the model's files decide" in said
    assert "swap_space=4.0 has no effect" in said and "tensor_parallel_size" not in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--decode-context-parallel-size", "2"], "decode_context_parallel_size=2 is not supported"),
        (["--enable-lora", "--max-lora-rank", "0"], "max_lora_rank=0 is out of range"),
        (["--api-server-count", "4"], "one process serves"),
        (["--speculative-config", '{"method": "hydra"}'], "'hydra' is unknown: choose one of auto"),
        (["--hf-overrides", "{"], "hf_overrides='{' is not valid JSON"),
        (["--hf-overrides", '{"a": 1}'], "change config.json"),
        (["--tensor-paralel-size", "1"], "No such option"),
        (["--max_num_seq", "1"], "No such option"),
        (["--speculative-config.method", "hydra"], "'hydra' is unknown"),
        (["--speculative-config.method"], "give --speculative-config.method VALUE"),
        (["--speculative-config..method", "x"], "is no flag"),
        (["--speculative-config", "auto", "--speculative-config.method", "ngram"], "exclude each other"),
        (["--root-path", "llm"], "give a path such as /llm"),
        (["--dtype", "quarter"], "dtype='quarter' is unknown"),
    ],
)
def test_refused(served: list[Any], capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["serve", "smollm2", *flags]) in (1, 2)
    assert said in capsys.readouterr().err and not served


def test_not_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    main(["serve", "--help"])
    shown = capsys.readouterr().out.split()
    assert "--port" in shown and not {f"--{field.name.replace('_', '-')}" for field in fields(VllmFlags)} & set(shown)


def test_nested_values_make_one_object(served: list[Any]) -> None:
    nested = ["--speculative_config.method=ngram", "--speculative-config.prompt-lookup-max", "4"]
    assert main(["serve", "smollm2", "--speculative-config", '{"prompt_lookup_min": 2}', *nested]) == 0
    wanted = {"prompt_lookup_min": 2, "method": "ngram", "prompt_lookup_max": 4}
    assert json.loads(served[0][1]["speculative_config"]) == wanted


def test_few_adapters_in_memory_are_few_in_a_step() -> None:
    assert EngineConfig.from_options(enable_lora=True, max_cpu_loras=2).max_loras == 2


def test_in_a_file(served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: smollm2\ntensor-parallel-size: 1\ntrust-remote-code: true\ndtype: half\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert served[0][1] == {"dtype": "float16", "tensor_parallel_size": 1}
    assert "trust_remote_code=True has no effect" in capsys.readouterr().err
    file.write_text("model: smollm2\ndecode-context-parallel-size: 2\n")
    assert main(["serve", "--config", str(file)]) == 1 and "one device" in capsys.readouterr().err
