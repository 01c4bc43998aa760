"""Options that change nothing where the model runs say so."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.api.idle_options import find_idle
from penstock.api.llm import LLM
from penstock.config import EngineConfig
from tests.llm import tiny


@pytest.mark.parametrize(
    ("options", "device", "packed", "idle"),
    [
        ({"enforce_eager": True}, "cpu", 0.0, ["enforce_eager"]),
        ({"enforce_eager": True}, "cuda", 0.0, []),
        ({"gpu_memory_utilization": 0.5}, "cpu", 0.0, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.5}, "cuda", 0.0, []),
        ({"activation_dtype": "float32"}, "cuda", 0.0, ["activation_dtype"]),
        ({"activation_dtype": "float32"}, "cpu", 0.0, ["activation_dtype"]),
        ({"activation_dtype": "float32"}, "cpu", 0.9, []),
        ({"activation_dtype": "float32", "dtype": "float32"}, "cpu", 0.9, ["activation_dtype"]),
        ({"activation_dtype": "int8", "quantization": "int4"}, "cpu", 0.0, []),
        ({"quantization": "int8"}, "cpu", 1.0, ["quantization"]),
        ({"quantization": "int8"}, "cpu", 0.9, []),
        ({"quantization": "int8"}, "cuda", 1.0, []),
        ({"quantization": "int8", "dtype": "bfloat16"}, "cpu", 1.0, []),
        ({"distributed_executor_backend": "ray"}, "cpu", 0.0, ["distributed_executor_backend"]),
        ({"enable_expert_parallel": True}, "cpu", 0.0, ["enable_expert_parallel"]),
        ({"enable_expert_parallel": True, "pipeline_parallel_size": 2}, "cpu", 0.0, ["enable_expert_parallel"]),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "cpu", 0.0, []),
        ({"ray_placement": "SPREAD", "tensor_parallel_size": 2}, "cpu", 0.0, ["ray_placement"]),
        ({"master_addr": "10.0.0.1", "master_port": 9}, "cpu", 0.0, ["master_addr", "master_port"]),
        ({"master_addr": "10.0.0.1", "tensor_parallel_size": 2}, "cpu", 0.0, ["master_addr"]),
        ({"master_addr": "10.0.0.1", "pipeline_parallel_size": 2, "nnodes": 2}, "cpu", 0.0, []),
        (
            {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2, "master_port": 9},
            "cpu",
            0.0,
            ["master_port"],
        ),
        ({"distributed_secret_file": "a"}, "cpu", 0.0, ["distributed_secret_file"]),
        ({"distributed_secret_file": "a", "tensor_parallel_size": 2}, "cpu", 0.0, ["distributed_secret_file"]),
        ({"distributed_secret_file": "a", "pipeline_parallel_size": 2, "nnodes": 2}, "cpu", 0.0, []),
        ({}, "cpu", 1.0, []),
        ({}, "cuda", 0.0, []),
    ],
)
def test_each_names_itself_where_it_does_nothing(
    options: dict[str, Any], device: str, packed: float, idle: list[str]
) -> None:
    assert list(find_idle(EngineConfig(**options), device, packed)) == idle


def test_an_encoder_has_no_cache_to_store() -> None:
    assert list(find_idle(EngineConfig(kv_cache_dtype="float32"), "cpu", 0.0, has_cache=False)) == ["kv_cache_dtype"]


def test_it_is_logged_and_shown(config_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tiny.dummy(config_folder, enforce_eager=True) as llm:
        why = {setting.name: setting.why for setting in llm.settings}
    assert "enforce_eager=True has no effect: graphs are captured on GPUs only" in caplog.text
    assert why["enforce_eager"].startswith("without effect: ")


def test_a_quantized_file_is_not_quantized_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM("smollm2", quantization="int8", max_model_len=64):
        pass
    assert "quantization=int8 has no effect: the file's matrices are already quantized" in caplog.text
