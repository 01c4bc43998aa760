"""DRY, XTC, mirostat, top_n_sigma, dynamic temperature and repeat_last_n."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock import LLM, SamplingParams
from penstock.ops.sampling.sample import sample
from penstock.sampling.rare.chain import _filter_by_mirostat, apply_chain
from penstock.sampling.row import RowState
from penstock.text.prompt_encoder import Encoded
from penstock.types import Request
from tests.gpu.answers import prompts
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.choices import _chi_square, _drawn
from tests.gpu.models import DEVICE, engine, log_probabilities, made
from tests.ops.examples import normal
from tests.ops.sampler_rows import ASKED, drawn, rows_of

NO_BREAKERS: dict[str, Any] = {"dry_sequence_breakers": ()}
DRAWN: list[dict[str, Any]] = [
    {"top_n_sigma": 1.2},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"dynatemp_range": 0.8, "top_k": 50},
    {"mirostat": 1, "mirostat_tau": 3.5},
    {"mirostat": 2, "mirostat_tau": 4.0},
]
NUM_DRAWS = 1000


@check([(300, 2.0), (9000, 3.0), (50_000, 0.5), (151_936, 4.0)])
def samplers_of_the_device_are_their_reference(size: int, scale: float) -> Figures:
    """Tokens, counts, texts and mu of some steps."""
    if DEVICE == "cpu":
        raise Skip("no GPU")
    steps, same, total = 4, 0, 0
    for seed in range(3):
        states = rows_of(size, seed, len(ASKED))
        logits = normal(seed, steps, len(states), size, scale=scale)
        logits[:, 3, :100] = -torch.inf
        found = drawn(states, logits, DEVICE, steps, sample.bodies["cuda"].function)
        expected = drawn(states, logits, "cpu", steps, sample.reference)
        for mine, theirs in zip(np.array(found[0]).T, np.array(expected[0]).T):
            same, total = same + int((mine == theirs).all()), total + 1
            at = total - 1 - seed * len(states)
            if (mine == theirs).all():
                require(abs(float(found[3][at] - expected[3][at])) < 1e-2, f"another mu with {ASKED[at]}")
                require(torch.equal(found[1][at], expected[1][at]), f"other counts with {ASKED[at]}")
                require(torch.equal(found[2][at], expected[2][at]), f"another text with {ASKED[at]}")
    require(same >= total - 2, f"{same} of {total} rows have the reference's tokens")  # a draw may fall between bits
    return {"rows": f"{same}/{total}"}


def _expected(logits: torch.Tensor, prompt: list[int], sampling: dict[str, Any]) -> torch.Tensor:
    """The distribution of the first token, by the host's samplers; what depends on a chance in both cases."""
    values = logits.float().cpu().numpy()
    found = np.zeros(len(values))
    cases = (
        [
            ({**sampling, "xtc_probability": float(met)}, share)
            for met, share in ((1, sampling["xtc_probability"]), (0, 1 - sampling["xtc_probability"]))
        ]
        if "xtc_probability" in sampling
        else [(sampling, 1.0)]
    )
    for asked, share in cases:
        state = RowState(
            Request(id="r", tokens=tuple(prompt), sampling=SamplingParams(temperature=1.0, **asked)),
            0,
            prompt,
            len(prompt),
        )
        top, mu = float(values.max()), state.samplers.mu
        ids, weights = apply_chain(values, top, state) if mu is None else _filter_by_mirostat(values, top, state, mu)
        found[np.arange(len(values)) if ids is None else ids] += share * weights / weights.sum(dtype=np.float64)
    return torch.from_numpy(found)


@check([(asked,) for asked in DRAWN])
def draws_of_samplers_follow_the_probabilities(asked: dict[str, Any]) -> Figures:
    one, prompt = made("LlamaForCausalLM"), prompts(9)[0]
    expected = _expected(log_probabilities(one.model, prompt)[-1], prompt, asked)
    with engine(one.folder) as llm:
        found = _drawn(llm, prompt, NUM_DRAWS, len(expected), temperature=1.0, **asked)
    figures: Figures = {"kept": int((expected > 0).sum()), "chi²": _chi_square(found, expected)}
    require(not found[expected == 0].any(), f"a token was drawn that is left out: {figures}")
    require(figures["chi²"] < 45.3, f"draws do not follow the probabilities: {figures}")
    return figures


@check()
def penalties_of_samplers_are_those_of_a_cpu() -> Figures:
    """DRY and repeat_last_n on texts that repeat themselves, beside plain rows."""
    one = made("LlamaForCausalLM")
    given = (prompts(12)[0] * 8)[:80]
    kinds: list[dict[str, Any]] = [
        {"dry_multiplier": 4.0, **NO_BREAKERS},
        {"dry_multiplier": 2.0, "dry_penalty_last_n": 30, **NO_BREAKERS},
        {"dry_multiplier": 9.0, "dry_allowed_length": 0, **NO_BREAKERS},
        {"repetition_penalty": 1.6, "repeat_last_n": 9},
        {"frequency_penalty": 1.5, "repeat_last_n": 4},
        {},
    ]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, **kind) for kind in kinds]
    answers = []
    for options in ({}, {"device": "cpu"}):
        with engine(one.folder, **options) as llm:
            outputs = llm.generate([given] * len(params), params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    wrong = [str(kind) for kind, a, b in zip(kinds, *answers) if a != b]
    require(not wrong, f"other tokens than on a CPU with {', '.join(wrong)}")
    return {"kinds": len(kinds), "different": len({tuple(answer) for answer in answers[0]})}


def _answers(llm: LLM, given: list[list[int]], params: list[SamplingParams], preempted: bool) -> list[list[int]]:
    service = llm.service
    collectors = [service.submit(Encoded(prompt), one) for prompt, one in zip(given, params)]
    step = 0
    while service.engine.has_work:
        running = service.engine.scheduler.roster.running
        if preempted and running and step % 5 == 4:
            service.engine.scheduler.roster.preempt(running[step % len(running)])
        service.step()
        step += 1
    return [list(collector.output().outputs[0].token_ids) for collector in collectors]


@check()
def samplers_go_on_after_giving_way() -> Figures:
    """With deterministic kernels: the same tokens, however often a row is preempted and taken in again."""
    one = made("LlamaForCausalLM")
    kinds: list[dict[str, Any]] = [
        *DRAWN,
        {"dry_multiplier": 2.0, **NO_BREAKERS},
        {"repetition_penalty": 1.4, "repeat_last_n": 6},
        {},
    ]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True, detokenize=False, **kind)
        for i, kind in enumerate(kinds)
    ]
    given = prompts(*range(5, 5 + len(kinds)))
    with engine(one.folder, deterministic=True) as llm:
        expected = _answers(llm, given, params, False)
        found = _answers(llm, given, params, True)
        alone = [_answers(llm, [prompt], [one], False)[0] for prompt, one in zip(given, params)]
    wrong = [str(kind) for kind, a, b, c in zip(kinds, expected, found, alone) if not a == b == c]
    require(not wrong, f"other tokens after giving way, or alone, with {', '.join(wrong)}")
    return {"kinds": len(kinds)}
