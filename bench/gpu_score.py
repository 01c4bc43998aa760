"""How far an engine's log probabilities are from transformers' on the same random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.models.reading import from_seed
from penstock.models.spec import ModelSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SPARE_BYTES = 8 << 30  # beside an oracle in float32


@dataclass(frozen=True)
class Answered:
    prompt: list[int]
    answer: list[int]


Scored = Mapping[str, tuple[list[Answered], list[list[float]]]]


def own_logprobs(llm: LLM, sequences: list[Answered]) -> list[list[float]]:
    """The engine's own, of each answer's tokens: prompt and answer are read as a prompt once more."""
    params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([one.prompt + one.answer for one in sequences], params, use_tqdm=False)
    found = []
    for one, output in zip(sequences, outputs):
        told = (output.prompt_logprobs or [])[len(one.prompt) :]
        found.append([_of(entry, token) for entry, token in zip(told, one.answer, strict=True)])
    return found


def decoded(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[Answered], list[list[float]]]:
    """New answers token by token, and the log probabilities they were drawn with."""
    params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0)
    sequences, found = [], []
    for prompt, output in zip(prompts, llm.generate(list(prompts), params, use_tqdm=False)):
        answer = output.outputs[0]
        sequences.append(Answered(prompt, list(answer.token_ids)))
        found.append([_of(entry, token) for entry, token in zip(answer.logprobs or [], answer.token_ids, strict=True)])
    return sequences, found


def _of(entry: Any, token: int) -> float:
    return float(entry[token].logprob)


def dummy_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Those of an engine with load_format="dummy", parameter by parameter, under the names of a checkpoint's parts."""
    take, merges = from_seed(spec, seed, dtype, device), spec.merges()
    for name in spec.parameters():
        module, _, suffix = name.rpartition(".")
        tensor = take(name)
        merge = merges.get(module)
        if merge is None:
            yield name, tensor
            continue
        above = module.rpartition(".")[0]
        first = 0
        for part, rows in merge.parts:
            yield f"{above}.{part}.{suffix}", tensor[first : first + rows]
            first += rows


def oracle(folder: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model of the folder's config with those weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    auto: Any = transformers.AutoModelForCausalLM
    with device:
        made = auto.from_config(config, dtype=dtype).eval()
    places: dict[str, Tensor] = {}
    for name, parameter in made.named_parameters():
        stored = spec.names.find(name)
        if stored is None or stored.layout != "plain":
            raise ValueError(f"parameter {name!r} cannot be filled in: {spec.architecture} stores it another way")
        places[stored.name] = parameter
    with torch.no_grad():
        for name, tensor in dummy_weights(spec, dtype, device):
            places.pop(name).copy_(tensor)
    places.pop("head.rows.weight" if spec.head is not None and spec.head.tied else "", None)
    if places:
        raise ValueError(f"parameters {', '.join(sorted(places))} have no weights")
    return made


def oracle_logprobs(model: Any, sequences: list[Answered], device: torch.device) -> list[list[float]]:
    found = []
    for one in sequences:
        ids = torch.tensor([one.prompt + one.answer], device=device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(one.answer) + 1, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(one.prompt) :, None])
        found.append(chosen[:, 0].tolist())
    return found


def distance(a: list[list[float]], b: list[list[float]]) -> dict[str, float]:
    """Between log probabilities of the same tokens."""
    apart = [abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return {"mean": round(sum(apart) / len(apart), 5), "max": round(max(apart), 5), "tokens": len(apart)}


def score(folder: str, spec: ModelSpec, dtype: str, device: str, sets: Scored) -> dict[str, Any]:
    """|Δ logprob| to transformers in the same dtype, and of both to transformers in float32 where that has room."""
    where = torch.device(device)
    model = oracle(folder, spec, DTYPES[dtype], where)
    theirs = {name: oracle_logprobs(model, sequences, where) for name, (sequences, _) in sets.items()}
    found: dict[str, Any] = {name: distance(own, theirs[name]) for name, (_, own) in sets.items()}
    if DTYPES[dtype] == torch.float32:
        return found
    with suppress(torch.cuda.OutOfMemoryError):
        if device == "cuda" and torch.cuda.mem_get_info()[0] < 4 * spec.num_parameters + SPARE_BYTES:
            return found
        exact = model.float()
        for name, (sequences, own) in sets.items():
            best = oracle_logprobs(exact, sequences, where)
            found[f"{name}_to_float32"] = {
                "penstock": distance(own, best),
                "transformers": distance(theirs[name], best),
            }
    return found
