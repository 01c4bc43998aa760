"""Logits processors: callables of a user, given each row's logits before anything else looks at them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from penstock import LLM, PenstockError, SamplingParams
from penstock.errors import InvalidRequest
from penstock.sampling.row import Chooser, RowState
from penstock.types import Request
from tests.llm import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def only_seven(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    kept = logits[7].item()
    logits[:] = float("-inf")
    logits[7] = kept
    return logits


def count_up(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    wanted = torch.full_like(logits, -1e9)
    wanted[prompt[0] + len(output)] = 0.0
    return wanted


def no_change(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


class Forbid:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[self.ids] = -torch.inf
        return logits


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [answer.token_ids for output in llm.generate(prompts, params, use_tqdm=False) for answer in output.outputs]


def test_both_signatures_beside_rows_without(llm: LLM) -> None:
    plain = tokens(llm, [[3, 4]], GREEDY)
    found = tokens(
        llm,
        [[1, 2], [10, 2], [3, 4], [3, 4]],
        [
            GREEDY.clone(logits_processors=[only_seven]),
            GREEDY.clone(logits_processors=[count_up]),
            GREEDY,
            GREEDY.clone(logits_processors=[no_change]),
        ],
    )
    assert found == [[7] * 6, list(range(10, 16)), *plain, *plain]


def test_siblings_and_seeds(llm: LLM) -> None:
    """Each sibling's callable sees its own tokens; one that changes nothing changes nothing."""
    sampled = SamplingParams(n=3, seed=5, max_tokens=6, top_k=20, repetition_penalty=1.3, ignore_eos=True)
    assert tokens(llm, [1, 2], sampled) == tokens(llm, [1, 2], sampled.clone(logits_processors=[no_change]))
    seen: list[list[int]] = []

    def note(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return logits

    found = tokens(llm, [1, 2], sampled.clone(logits_processors=[note]))
    assert sorted(seen) == sorted(answer[:end] for answer in found for end in range(6))


def test_in_order_and_before_bias_masks_and_penalties(llm: LLM) -> None:
    """What a callable does cannot undo a mask; each sees what the one before it made."""

    def add(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 1

    def check(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        values.append(float(logits[0]))
        return logits

    values: list[float] = []
    tokens(llm, [1, 2], GREEDY.clone(max_tokens=1, logits_processors=[check, add, check], logit_bias={0: 50.0}))
    assert values[1] == values[0] + 1 and values[0] < 40
    assert tokens(llm, [1, 2], GREEDY.clone(logits_processors=[only_seven], allowed_token_ids=[7, 8]))[0] == [7] * 6
    with pytest.raises(PenstockError, match=r"logits_processors, allowed_token_ids \(1\)"):
        tokens(llm, [1, 2], GREEDY.clone(logits_processors=[only_seven], allowed_token_ids=[8]))


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    asked = GREEDY.clone(max_tokens=1, logprobs=3)
    plain = llm.generate([1, 2], asked, use_tqdm=False)[0].outputs[0].logprobs
    forced = (
        llm.generate(
            [1, 2],
            asked.clone(logits_processors=[Forbid(list(plain[0])[:1])]),  # type: ignore[index]
            use_tqdm=False,
        )[0]
        .outputs[0]
        .logprobs
    )
    assert plain is not None and forced is not None
    first, second = list(plain[0])[:2]
    assert next(iter(forced[0])) == second and forced[0][first] == plain[0][first]


def broken(output: list[int], logits: torch.Tensor) -> Any:
    if len(output) == 2:
        raise KeyError("my table lacks it")
    return logits


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (broken, r"logits_processors\[0\] \(broken\) failed: KeyError: 'my table lacks it' \(line \d+ of broken\)"),
        (lambda output, logits: None, "returned NoneType: it must return the logits, a tensor of shape"),
        (lambda output, logits: logits[:5], r"returned a tensor of shape \(5,\)"),
        (lambda output, logits: logits * float("nan"), "returned NaN or infinity"),
        (lambda output, logits: logits.fill_(-torch.inf), "leave no token to sample"),
        (lambda output: output, "failed: TypeError"),
    ],
)
def test_a_failure_ends_its_own_request(llm: LLM, processor: Any, said: str) -> None:
    """The neighbour gets what it gets alone."""
    alone = tokens(llm, [3, 4], GREEDY)
    bad, good = llm.generate([[1, 2], [3, 4]], [GREEDY.clone(logits_processors=[processor]), GREEDY], use_tqdm=False)
    assert bad.error is not None and good.outputs[0].token_ids == alone[0]
    assert bad.outputs[0].finish_reason == "error"
    with pytest.raises(PenstockError, match=said):
        llm.generate([1, 2], GREEDY.clone(logits_processors=[processor]), use_tqdm=False)


def test_copies_and_pickles() -> None:
    params = SamplingParams(logits_processors=[only_seven, Forbid([1])])
    assert copy.deepcopy(params).logits_processors[0] is only_seven  # type: ignore[index]
    assert pickle.loads(pickle.dumps(params)).logits_processors[1].ids == [1]
    assert params.clone(n=2).logits_processors == params.logits_processors
    with pytest.raises(InvalidRequest, match="a list of callables"):
        SamplingParams(logits_processors=["module.function"])
    with pytest.raises(InvalidRequest, match="a list of callables"):
        SamplingParams(logits_processors=only_seven)


def test_streams(llm: LLM) -> None:
    found = [id for delta in llm.stream([1, 2], GREEDY.clone(logits_processors=[count_up])) for id in delta.token_ids]
    assert found == [1, 2, 3, 4, 5, 6]


def less_of_the_same(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[list(set(output))] -= 3.0
    return logits


def test_the_same_in_any_company(config_folder: str) -> None:
    """Preempted, too: a callable sees the same tokens again."""
    prompts = [[i + 3, 5, 7] for i in range(6)]
    params = [
        SamplingParams(seed=i, max_tokens=40, ignore_eos=True, logits_processors=[less_of_the_same]) for i in range(6)
    ]
    with tiny.dummy(config_folder, kv_cache_tokens=96, max_model_len=64, block_size=8) as model:
        together = tokens(model, prompts, params)
        assert model.stats()["num_preemptions"] > 0
        assert together == [tokens(model, [prompt], one)[0] for prompt, one in zip(prompts, params)]


def test_the_host_chooses() -> None:
    for processors, on_device in ((None, True), ([no_change], False)):
        request = Request(id="r", tokens=(1,), sampling=GREEDY.clone(logits_processors=processors))
        assert (RowState(request, 0, (1,), 1).chooser is not Chooser.HOST) is on_device
