"""The benchmark of speculation on a GPU, without a GPU: the cycle repeats, and drafts of it are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import gpu_speculation
from bench.cycle import LENGTH, next_tokens
from bench.gpu_sets import SHAPES
from bench.gpu_speculation import NUM_SCRIPTED, Pair, draft_from_script, main, make_prompts
from tests.bench.test_gpu import OPTIONS, TINY
from tests.same_tokens.roads import Always


def run(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    common = ["--shape", "tiny", "--rounds", "1", "--output-tokens", "48"]
    assert main([*common, *words], OPTIONS) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**TINY, "vocab_size": 1000, "hidden_size": 64, "tie_word_embeddings": False}
    monkeypatch.setitem(SHAPES, "tiny", shape)
    open_pair = Pair.__init__

    def draft_always(self: Pair, *args: Any) -> None:
        open_pair(self, *args)
        engine: Any = self.on.service.engine
        engine.scheduler._speculation = Always()  # for a tiny model on a CPU drafts do not pay

    monkeypatch.setattr(Pair, "__init__", draft_always)


def test_each_kind_accepts_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if the weights make no cycle, if answers differ with drafts, or if scripted drafts are all right."""
    cycle, scripted = run(capsys, "--kind", "cycle", "--kind", "scripted", "--sequences", "2")
    assert cycle["same"] and scripted["same"]
    assert cycle["num_accepted_tokens"] > 0.9 * cycle["num_draft_tokens"] > 0
    share = scripted["num_accepted_tokens"] / scripted["num_draft_tokens"]
    assert 0.3 < share < 0.95
    assert "aim" not in cycle


def test_drafts_of_the_script_are_right_as_often_as_they_should() -> None:
    drafts = [draft_from_script(list(range(length))) for length in range(1, 2000)]
    right = [
        token == due
        for length, draft in enumerate(drafts, 1)
        for token, due in zip(draft, next_tokens((length - 1) % LENGTH, NUM_SCRIPTED))
    ]
    assert 0.75 < sum(right) / len(right) < 0.85


def test_random_prompts_have_no_token_of_the_cycle() -> None:
    assert min(min(prompt) for prompt in make_prompts("random", 4, 1000, 0)) >= LENGTH
    assert make_prompts("cycle", 3, 1000, 0) != make_prompts("cycle", 3, 1000, 1)


def test_a_machine_without_a_gpu_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_speculation.main([]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
