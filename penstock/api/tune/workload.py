"""Run a workload in this process: prompts of random ids, all at once, new ones each time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from penstock.api.llm import LLM
from penstock.api.tune.search import Options, Run
from penstock.errors import InvalidConfig, PenstockError
from penstock.types import SamplingParams


@dataclass(frozen=True)
class Requests:
    concurrency: int
    prompt_tokens: int
    output_tokens: int


class Bench:
    """Keeps the model of the last options open: loading takes longer than a run."""

    def __init__(self, model: str, requests: Requests) -> None:
        self._model, self._requests = model, requests
        self._options: Options | None = None
        self._llm: LLM | None = None
        self._chance = random.Random(0)

    def measure(self, options: Options) -> Run:
        llm = self._open(options)
        size = llm.service.assembly.spec.vocab_size
        wanted = self._requests
        prompts = [
            {"prompt_token_ids": [self._chance.randrange(size) for _ in range(wanted.prompt_tokens)]}
            for _ in range(wanted.concurrency)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=wanted.output_tokens, ignore_eos=True)
        begun_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun_s
        first, each = [], []
        for output in outputs:
            times: Any = output.metrics
            latency_s = times.first_token_time - times.arrival_time
            first.append(1e3 * latency_s)
            each.append(1e3 * (times.finished_time - times.first_token_time) / max(1, wanted.output_tokens - 1))
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return Run(tokens / seconds, _most(first), _most(each))

    def _open(self, options: Options) -> LLM:
        if self._llm is not None and options == self._options:
            return self._llm
        self.close()
        try:
            self._llm = LLM(self._model, **{"skip_tokenizer_init": True, **options})
        except PenstockError as error:
            raise InvalidConfig(str(error)) from None
        self._options = options
        warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        self._llm.generate([{"prompt_token_ids": [1] * self._requests.prompt_tokens}], warm, use_tqdm=False)
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None


def _most(values: list[float]) -> float:
    """Return what nine in ten are under."""
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def find_knobs(num_cores: int, requests: Requests, is_gpu: bool) -> dict[str, list[Any]]:
    """Return the settings that are tried, and their values; none changes an answer on a CPU. Drafts are left out: how
    many are accepted depends on real texts."""
    rows = [count for count in (8, 16, 32, 64, 128, 256, 512, 1024) if requests.concurrency / 8 < count]
    knobs: dict[str, list[Any]] = {
        "max_num_seqs": rows[:4],
        "max_num_batched_tokens": [2048, 4096, 16384] if is_gpu else [128, 256, 1024, 2048],
        "block_size": [16, 32, 64] if not is_gpu else [16],
    }
    if not is_gpu:
        knobs["threads"] = sorted({max(1, num_cores // 2), max(1, num_cores - 1), num_cores})
    return knobs
