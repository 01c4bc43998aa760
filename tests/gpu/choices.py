"""Who chooses a token, and how."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.types import StructuredOutputsParams
from tests.gpu.answers import ask, ids, prompts
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import engine, log_probabilities, made

# What a token of the highest score is, whoever looks for it: nothing is drawn.
CERTAIN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 0.7},
    {"logit_bias": {5: 4.0}},
    {"allowed_token_ids": [3, 4, 5, 6]},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"min_tokens": 9, "logprobs": 0},
    {"repetition_penalty": 0.8, "logprobs": 5},
]
FILTERS: list[tuple[str, Any]] = [("top_k", 5), ("top_p", 0.6), ("min_p", 0.3)]
NUM_DRAWS = 4000
NUM_FILTERED = 1000


def _drawn(llm: LLM, prompt: list[int], count: int, vocab: int, **sampling: Any) -> torch.Tensor:
    """How often each token was the first, over as many seeds."""
    each = [SamplingParams(seed=i, max_tokens=1, ignore_eos=True, detokenize=False, **sampling) for i in range(count)]
    tokens = [answer[0] for answer in ids(ask(llm, [prompt] * count, each))]
    return torch.bincount(torch.tensor(tokens), minlength=vocab).double()


def _chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Over the likeliest 20 tokens and all others together; 45.3 is passed by one in a thousand."""
    top = expected.argsort(descending=True)[: min(20, int((expected > 0).sum()))]
    counts = torch.cat([found[top], found.sum()[None] - found[top].sum()])
    wanted = torch.cat([expected[top], 1 - expected[top].sum()[None]]) * found.sum()
    used = wanted > 1e-9
    return float(((counts - wanted).square() / wanted)[used].sum())


@check()
def draws_of_the_device_follow_the_probabilities() -> Figures:
    """The first token of many seeds against the oracle's softmax at two temperatures."""
    one, prompt = made("LlamaForCausalLM"), prompts(9)[0]
    last = log_probabilities(one.model, prompt)[-1]
    figures: Figures = {}
    with engine(one.folder) as llm:
        for temperature in (0.5, 1.0):
            expected = torch.softmax(last / temperature, -1).double().cpu()
            found = _drawn(llm, prompt, NUM_DRAWS, len(expected), temperature=temperature)
            figures[f"chi² at {temperature}"] = value = _chi_square(found, expected)
            require(value < 45.3, f"draws do not follow the probabilities: {figures}")
    return figures


def _kept(probabilities: torch.Tensor, name: str, value: float) -> torch.Tensor:
    """The probabilities after a filter."""
    ranked, order = probabilities.sort(descending=True)
    if name == "top_k":
        stay = torch.arange(len(ranked)) < value
    elif name == "top_p":
        stay = ranked.cumsum(0) - ranked < value
    else:
        stay = ranked >= value * ranked[0]
    kept = torch.zeros_like(probabilities)
    kept[order] = ranked * stay
    return kept / kept.sum()


@check(FILTERS)
def draws_of_filtered_tokens_follow_the_probabilities(name: str, value: float) -> Figures:
    one, prompt = made("LlamaForCausalLM"), prompts(9)[0]
    expected = _kept(log_probabilities(one.model, prompt)[-1].exp().double().cpu(), name, value)
    with engine(one.folder) as llm:
        found = _drawn(llm, prompt, NUM_FILTERED, len(expected), temperature=1.0, **{name: value})
    figures: Figures = {"kept": int((expected > 0).sum()), "chi²": _chi_square(found, expected)}
    require(not found[expected == 0].any(), f"a token was drawn that {name} leaves out: {figures}")
    require(figures["chi²"] < 45.3, f"draws do not follow the probabilities: {figures}")
    return figures


@check()
def draws_follow_from_seed_and_position() -> Figures:
    one, given = made("LlamaForCausalLM"), prompts(3, 20, 44, 9, 70)
    with engine(one.folder) as llm:
        first, second, other = (ids(ask(llm, given, temperature=1.0, seed=seed)) for seed in (5, 5, 6))
        alone = [ids(ask(llm, [prompt], temperature=1.0, seed=5))[0] for prompt in given]
    require(first == second and first != other, "a seed does not decide its draws")
    same = sum(a == b for a, b in zip(first, alone))
    require(same >= 4, f"{same} of 5 answers are the same alone")  # one draw may fall between last bits
    return {"alone": f"{same}/5"}


def _told(output: Any) -> list[float]:
    """All log probabilities of an answer and its prompt, those of a place by their size."""
    places = [*(output.outputs[0].logprobs or ()), *(ranked for ranked in output.prompt_logprobs or () if ranked)]
    return [value for ranked in places for value in sorted(one.logprob for one in ranked.values())]


@check()
def penalties_masks_and_log_probabilities_are_those_of_a_cpu() -> Figures:
    """All at once beside a plain row, against the same model on the CPU."""
    one, given = made("LlamaForCausalLM"), prompts(24)[0]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, **kind)
        for kind in [*CERTAIN, {}]
    ]
    answers = []
    for options in ({}, {"device": "cpu"}):
        with engine(one.folder, **options) as llm:
            answers.append(ask(llm, [given] * len(params), params))
    wrong = [
        str(kind) for kind, a, b in zip([*CERTAIN, {}], *answers) if a.outputs[0].token_ids != b.outputs[0].token_ids
    ]
    require(not wrong, f"other tokens than on a CPU with {', '.join(wrong)}")
    apart = [abs(x - y) for a, b in zip(*answers) for x, y in zip(_told(a), _told(b), strict=True)]
    require(len(apart) > 100 and max(apart) < 1e-3, f"log probabilities are up to {max(apart, default=1.0)} apart")
    allowed = answers[0][next(i for i, kind in enumerate(CERTAIN) if "allowed_token_ids" in kind)]
    require(set(allowed.outputs[0].token_ids) <= {3, 4, 5, 6}, "a token that was not allowed")
    require(len({tuple(answer) for answer in ids(answers[0])}) >= 4, "penalties and masks change nothing")
    return {"kinds": len(params), "most |Δ|": max(apart)}


@check()
def beams() -> Figures:
    one, given = made("LlamaForCausalLM"), prompts(12)
    found = []
    for options in ({}, {"device": "cpu"}):
        with engine(one.folder, **options) as llm:
            best = llm.beam_search(given, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))[0]
            found.append([(list(beam.tokens), beam.cum_logprob) for beam in best.sequences])
    require([tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]], "other beams than on a CPU")
    most = max(abs(a - b) for (_, a), (_, b) in zip(*found))
    require(most < 1e-3, f"scores are {most} apart")
    return {"most |Δ|": most}


@check()
def grammars() -> Figures:
    """An answer that must be one of a few, and one that must match an expression, beside a plain row."""
    missing = [name for name in ("llguidance", "jinja2", "tokenizers") if find_spec(name) is None]
    if missing:
        raise Skip(f"{', '.join(missing)} not installed")
    from tests.llm.tiny import write_tokenizer

    one = made("LlamaForCausalLM")
    write_tokenizer(one.folder)
    wanted = [StructuredOutputsParams(choice=["yes", "no"]), StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}")]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured_outputs=each) for i, each in enumerate(wanted)
    ] + [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    with engine(one.folder, skip_tokenizer_init=False) as llm:
        texts = _texts(llm, params)
    require(texts[0] in ("yes", "no"), f"{texts[0]!r} is not one of the choices")
    require(len(texts[1]) == 7 and texts[1][4] == "-" and texts[1].replace("-", "").isdigit(), f"{texts[1]!r}")
    return {"answers": texts[:2]}


def _texts(llm: LLM, params: list[SamplingParams]) -> list[str]:
    outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    for output in outputs:
        require(output.error is None, f"a request failed: {output.error}")
    return [output.outputs[0].text for output in outputs]
