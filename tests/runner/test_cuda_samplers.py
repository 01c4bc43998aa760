"""DRY, XTC, mirostat and the like through the GPU's runner, without a GPU, against the CPU's: rows come, go, and give
way to each other. Everything asked for leaves one token to draw, as both draw with other numbers."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import SamplingParams, StructuredOutputsParams  # noqa: E402
from penstock.runner.cuda.rows import DeviceParams  # noqa: E402
from penstock.sampling.row import Chooser  # noqa: E402
from tests.runner.test_cuda_mixed import Asked, one_thread, served, with_texts  # noqa: E402, F401  a fixture
from tests.runner.test_cuda_runner import answers, asking, engines, no_gpu  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
DRY: dict[str, Any] = {"dry_multiplier": 3.0, "dry_allowed_length": 1}
KINDS: list[dict[str, Any]] = [
    DRY,
    {**DRY, "dry_penalty_last_n": 12, "dry_sequence_breakers": ["a", "1"]},
    {**DRY, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.5, "repeat_last_n": 5},
    {"frequency_penalty": 1.2, "repeat_last_n": 9},
    {"repetition_penalty": 1.5, "repeat_last_n": 0},
    {"temperature": 0.8, "top_n_sigma": 1e-6},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 2},
    {"temperature": 0.7, "dynatemp_range": 0.5, "top_k": 1},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 0.0},
    {"temperature": 1.0, "mirostat": 1, "mirostat_tau": 0.0, **DRY},
    {},
    {"presence_penalty": 0.7},
    {"logprobs": 2},
]


def test_the_same_answers_in_any_company(tmp_path: Path, no_gpu: None) -> None:
    random = Random(3)
    beginnings = [[random.choice((5, 6, 7, 8)) for _ in range(30)] for _ in range(3)]
    asked = [
        Asked(
            random.randint(0, 15),
            random.choice(beginnings)[: random.choice([3, 17, 30])],
            asking(max_tokens=random.choice([6, 20]), seed=3, **kind),
            None,
        )
        for kind in KINDS
    ]
    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False, kv_cache_tokens=256) as (usual, other):
        expected, found = served(usual, asked, Random(1)), served(other, asked, Random(1))
        for one, mine, theirs in zip(asked, found, expected, strict=True):
            assert mine == theirs, one
        assert not other.stats()["num_failed_steps"]


def test_one_row_does_not_end_overlap(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a row with such a sampler has its tokens chosen by the host."""
    left: list[int] = []
    monkeypatch.setattr(DeviceParams, "skip", lambda self, row, state: left.append(row))
    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False) as (_, other):
        for kind in KINDS[1::3]:
            answers(other, [[5, 6, 7]] * 2, [asking(max_tokens=4, seed=1, **kind), asking(max_tokens=4)])
    assert not left


@pytest.mark.slow
def test_mu_is_kept_while_host_and_device_choose_in_turns(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host looks after a grammar's budget now and then; what the device knows of mirostat and of the text must be
    what the host knows whenever the device chooses again."""
    from penstock.ops.sampling.extras import MU

    allow, leave, nums = DeviceParams.allow, DeviceParams.skip, [0]
    left: list[int] = []

    def allowing(self: DeviceParams, row: int, state: Any, num_generated: int) -> bool:
        allowed = allow(self, row, state, num_generated)
        if allowed and state.chooser is Chooser.DEVICE_EXTRAS and state.num_generated == num_generated:
            nums[0] += 1
            length = len(state.tokens)
            assert float(self.extras.numbers[row, MU]) == pytest.approx(state.samplers.mu, abs=1e-5)
            text = self.extras.history[row, :length]
            assert torch.where(text < 0, -1 - text, text).tolist() == state.tokens
        return allowed

    def leaving(self: DeviceParams, row: int, state: Any) -> None:
        left.append(row)
        leave(self, row, state)

    monkeypatch.setattr(DeviceParams, "allow", allowing)
    monkeypatch.setattr(DeviceParams, "skip", leaving)
    params = [
        SamplingParams(
            temperature=1,
            seed=1,
            max_tokens=60,
            mirostat=2,
            mirostat_tau=2.0,
            **DRY,
            structured_outputs=StructuredOutputsParams(regex="([0-9][a-z]){3,100}"),
        ),
        asking(max_tokens=60, presence_penalty=0.5),
    ]
    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False) as (_, other):
        answers(other, [[5, 6, 7]] * 2, params)
        assert other.stats()["num_failed_steps"] == 0
    assert nums[0] > 3 and left
