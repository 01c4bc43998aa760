"""Models as transformers makes them, whose logits lie close together, and how near an engine's answers come."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock import LLM
from penstock.types import RequestOutput
from tests.gpu.answers import ask
from tests.gpu.models import DEVICE, Made, log_probabilities

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "Qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
}
PROMPTS = [[(7 * i + j * j) % 1000 for j in range(5 + 37 * i)] for i in range(9)]
LENGTH = 40
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-plain-")


@lru_cache(maxsize=2)
def plain(kind: str, tied: bool = False) -> Made:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind], tie_word_embeddings=tied)
    made = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    folder = Path(_FOLDERS.name) / f"{kind}-{'tied' if tied else 'untied'}"
    made.save_pretrained(folder)
    return Made(folder, made.to(DEVICE))


def answers(llm: LLM, prompts: Sequence[list[int]], **sampling: Any) -> list[RequestOutput]:
    return ask(llm, prompts, max_tokens=LENGTH, **sampling)


def nearness(oracle: Any, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> tuple[float, float]:
    """The share of tokens that are the oracle's own choice after the same beginning, and the mean difference of the log
    probabilities that were told."""
    same, total, differences = 0, 0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        expected = log_probabilities(oracle, prompt + answer[:-1])[len(prompt) - 1 :]
        same += sum(a == b for a, b in zip(answer, expected.argmax(-1).tolist()))
        total += len(answer)
        differences += [
            abs(found[token].logprob - float(expected[at, token]))
            for at, (token, found) in enumerate(zip(answer, output.outputs[0].logprobs or ()))
        ]
    return same / total, sum(differences) / max(1, len(differences))
