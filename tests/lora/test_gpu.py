"""Adapters with the GPU's runner and its kernels, run by Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, LoRARequest, SamplingParams  # noqa: E402
from penstock.api import assemble  # noqa: E402
from penstock.errors import InvalidRequest  # noqa: E402
from penstock.models.spec import FAMILIES  # noqa: E402
from penstock.passes.lora_table import StackTable  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from tests.llm.tiny import runner, write_tokenizer  # noqa: E402
from tests.lora.adapters import write_for_spec  # noqa: E402
from tests.lora.conftest import Lab  # noqa: E402
from tests.models import oracle  # noqa: E402
from tests.ops.interpreter import steady_dots  # noqa: E402, F401  a fixture
from tests.runner.test_cuda_exact import Memory, on_device  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
SEQUENCES, TOKENS = 3, 24
PROMPTS = [[5, 9, 11], [(j * j) % 60 + 3 for j in range(21)], [40], [7, 7]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1, detokenize=False)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 24,
    "max_model_len": 128,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": TOKENS,
    "speculative_config": "off",
    "skip_tokenizer_init": True,
    "progress": False,
}


def like_a_gpu(base: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    def make_table(spec: Any, settings: Any, device: torch.device) -> StackTable:
        return StackTable(spec, settings.max_loras, settings.max_lora_rank, torch.float32, device)

    monkeypatch.setattr(assemble, "make_table", make_table)
    llm = LLM(base, **OPTIONS)
    theirs = runner(llm.service)
    theirs.model.ops.exact = True
    memory = Memory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
    made = CudaRunner(theirs.model, memory, None, SEQUENCES, TOKENS, True, True)  # type: ignore[arg-type]
    made.loras = theirs.loras
    made.warm()
    engine: Any = llm.service.engine
    engine.executor, engine.overlap = made, 1
    assert theirs.loras is not None
    engine.scheduler.roster.loras.memory.sum_rank = theirs.loras.table.sum_rank
    return llm


def ask(llm: LLM, loras: list[Any]) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=loras, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def require_near(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for (tokens, logprobs), (wanted, theirs) in zip(found, expected, strict=True):
        assert tokens == wanted
        for mine, other in zip(logprobs, theirs):
            assert all(mine[token].logprob == pytest.approx(other[token].logprob, abs=tolerance) for token in other)


def test_answers_are_those_of_a_cpu(lab: Lab, on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """More adapters than slots, a sum, and none, in one batch: each as it is alone, bit for bit."""
    loras: list[Any] = [lab.lora(0), None, [lab.lora(1, 0.5), lab.lora(0, -0.75)], lab.lora(3)]
    with like_a_gpu(lab.base, monkeypatch) as llm:
        found = ask(llm, loras)
        llm.reset_prefix_cache()
        alone = [llm.generate([p], PARAMS, lora_request=[one], use_tqdm=False)[0] for p, one in zip(PROMPTS, loras)]
        assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in alone] == found
        with pytest.raises(InvalidRequest, match=r"ranks of \d adapters .* over the 32 .*raise --max-lora-rank"):
            llm.generate([[5]], PARAMS, lora_request=[[lab.lora(i) for i in range(4)]], use_tqdm=False)
    monkeypatch.undo()
    with LLM(lab.base, **OPTIONS) as llm:
        expected, plain = ask(llm, loras), ask(llm, [None] * 4)
    require_near(found, expected, 1e-4)
    assert sum(tokens != without for (tokens, _), (without, _) in zip(found, plain)) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of rows that only fill up a step of the warm-up
@pytest.mark.parametrize(
    ("architecture", "beside"),
    [
        ("Qwen2MoeForCausalLM", (".shared.gate_up", ".shared_gate", ".router")),
        ("DeepseekV3ForCausalLM", (".q_b", ".kv_a", ".shared.down")),
    ],
)
def test_bases_of_other_kinds(
    architecture: str,
    beside: tuple[str, ...],
    tmp_path: Path,
    on_device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixtures with adapters on what every token goes through, and latents: as on a CPU."""
    described = {"architectures": [architecture], **FAMILIES[architecture].like[0], "vocab_size": 300}
    base = str(oracle.save(oracle.make(architecture, described), tmp_path / "base"))
    write_tokenizer(Path(base))
    loras: list[Any] = [
        LoRARequest(str(i), i, str(write_for_spec(tmp_path / str(i), described, seed=i))) for i in (1, 2)
    ]
    loras = [loras[0], None, list(reversed(loras)), loras[1]]
    with like_a_gpu(base, monkeypatch) as llm:
        bank = runner(llm.service).loras
        assert bank is not None and all(any(name.endswith(end) for name in bank.table) for end in beside)
        found, plain = ask(llm, loras), ask(llm, [None] * 4)
    monkeypatch.undo()
    with LLM(base, **OPTIONS) as llm:
        require_near(found, ask(llm, loras), 1e-3)
    assert sum(tokens != without for (tokens, _), (without, _) in zip(found, plain)) >= 2
