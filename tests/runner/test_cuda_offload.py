"""The GPU's runner over weights in host memory, without a GPU: copies through the buffers, in the steps' order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.llm.tiny import write_config
from tests.runner.test_cuda_runner import PROMPTS, answers, asking, engines, no_gpu

from penstock.passes.offload import Offload, OffloadedBlock  # isort: skip  # after Triton was told to interpret

__all__ = ["no_gpu"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("num_bytes", [40_000, 1 << 30])
def test_prompts_and_single_tokens_in_any_company(kind: str, num_bytes: int, tmp_path: Path, no_gpu: None) -> None:
    with engines(write_config(tmp_path, kind)) as (usual, other):
        params = [asking(max_tokens=5 + 4 * i) for i in range(len(PROMPTS))]
        expected = answers(usual, PROMPTS, params)
        executor: Any = other.service.engine.executor
        model: Any = executor.model
        offload = Offload(model, num_bytes, model.spec, torch.device("cpu"))
        vars(offload)["finish_block"] = lambda block, is_last: block
        model.blocks = [offload(block, block is model.blocks[-1]) for block in model.blocks]
        offload.finish(model)
        assert any(isinstance(block, OffloadedBlock) for block in model.blocks)
        executor.warm()  # steps of few rows and of many, by several threads at once
        for buffer in offload.stream.buffers:
            buffer.fill_(255)
        for _ in range(2):
            assert answers(other, PROMPTS, params) == expected
        assert other.stats()["num_failed_steps"] == 0
