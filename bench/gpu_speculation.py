"""Speculation on one GPU: drafts on and off by turns, in one process, on random weights of a real shape.

* random: prompts and answers without a pattern at temperature 1, where drafts can only cost
* cycle: weights that repeat 64 tokens, drafted by n-grams
* scripted: the same weights, drafts of 4 tokens of which each is right with 80 %

Greedy answers must be the same with and without drafts. One line of JSON per case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cycle import LENGTH, next_tokens, repeat_cycle
from bench.gpu_case import write_shape
from bench.gpu_sets import SHAPES

AIMS = {
    ("random", 1): 0.98,
    ("random", 32): 0.98,
    ("random", 256): 0.98,
    ("cycle", 1): 2.0,
    ("cycle", 8): 1.8,
    ("cycle", 32): 1.3,
    ("scripted", 1): 2.6,
}
NUM_PROMPT, NUM_OUTPUT = 128, 256
NUM_SCRIPTED, SCRIPTED_SHARE = 4, 0.8
METHODS = {
    "random": {"method": "auto"},
    "cycle": {"method": "ngram"},
    "scripted": {"method": "ngram", "num_speculative_tokens": NUM_SCRIPTED},
}


@dataclass(frozen=True)
class Run:
    out_tok_s: float
    answers: list[list[int]]


def draft_from_script(tokens: list[int]) -> list[int]:
    """Draft the cycle's next tokens, each spoilt with a chance of its own."""
    rng = random.Random(len(tokens))
    right = next_tokens(tokens[-1] % LENGTH, NUM_SCRIPTED)
    return [token if rng.random() < SCRIPTED_SHARE else (token + 7) % LENGTH for token in right]


def make_prompts(kind: str, count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that no other seed has; those of a cycle begin anywhere in it."""
    rng = random.Random(f"{kind} {count} {seed}")
    if kind == "random":
        return [[rng.randrange(LENGTH, vocab_size) for _ in range(NUM_PROMPT)] for _ in range(count)]
    return [next_tokens(rng.randrange(LENGTH), NUM_PROMPT) for _ in range(count)]


class Pair:
    """Two engines on one GPU, one of them drafting; both have the same weights."""

    def __init__(self, shape: str, kind: str, options: dict[str, Any]) -> None:
        from penstock import LLM

        self.kind, folder = kind, write_shape(shape)
        common = {"load_format": "dummy", "skip_tokenizer_init": True, "progress": False, "seed": 0, **options}
        draft_fn: Callable[[list[int]], list[int]] | None = draft_from_script if kind == "scripted" else None
        self.off = LLM(folder, speculative_config="off", **common)
        self.on = LLM(folder, speculative_config=METHODS[kind], draft_fn=draft_fn, **common)
        for llm in (self.off, self.on):
            engine: Any = llm.service.engine
            if kind != "random":
                repeat_cycle(engine.executor.model)
        if kind == "scripted":
            drafters: Any = self.on.service.engine.executor.rows.drafters  # type: ignore[attr-defined]
            drafters.drafters = tuple(one for one in drafters.drafters if one.name == "function")

    def close(self) -> None:
        self.off.close()
        self.on.close()

    def measure(self, count: int, rounds: int, num_output: int) -> dict[str, Any]:
        """Run new prompts on both, taking turns, after a warm-up."""
        speeds: dict[str, list[float]] = {"off": [], "on": []}
        before, same = self.on.stats(), True
        for number in range(rounds + 1):
            answers = []
            for name in ("off", "on") if number % 2 else ("on", "off"):
                run = self._run(getattr(self, name), count, number, num_output)
                answers.append(run.answers)
                if number:
                    speeds[name].append(run.out_tok_s)
            if not number:
                before = self.on.stats()
            same &= self.kind == "random" or answers[0] == answers[1]
        off, on = (statistics.median(speeds[name]) for name in ("off", "on"))
        after = self.on.stats()
        told = {name: after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens", "num_steps")}
        aim = AIMS.get((self.kind, count))
        return {
            "kind": self.kind,
            "sequences": count,
            "off_tok_s": round(off, 1),
            "on_tok_s": round(on, 1),
            "on_over_off": round(on / off, 3),
            **({} if aim is None else {"aim": aim, "met": on / off >= aim}),
            **told,
            "same": same,
        }

    def _run(self, llm: Any, count: int, number: int, num_output: int) -> Run:
        from penstock import SamplingParams

        prompts = make_prompts(self.kind, count, llm.service.assembly.spec.vocab_size, number)
        temperature = 1.0 if self.kind == "random" else 0.0
        params = SamplingParams(temperature=temperature, seed=number, ignore_eos=True, max_tokens=num_output)
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Run(sum(map(len, answers)) / seconds, answers)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m bench.gpu_speculation", description=__doc__.split("\n")[0])
    add = made.add_argument
    add("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    add("--kind", dest="kinds", action="append", choices=list(METHODS), help="may be repeated (default: all)")
    add("--sequences", type=int, action="append", help="at once; may be repeated (default: those that have an aim)")
    add("--rounds", type=int, default=3, help="timed requests of each engine (default: %(default)s)")
    add("--output-tokens", type=int, default=NUM_OUTPUT, help="of each answer (default: %(default)s)")
    add("--deterministic", action="store_true", help="exact kernels only")
    chosen = made.parse_args(words)
    if chosen.rounds < 1 or chosen.output_tokens < 2:
        made.error("--rounds must be 1 or more, --output-tokens 2 or more")
    return chosen


def main(words: Sequence[str] | None = None, more: dict[str, Any] | None = None) -> int:
    """`more` are options of LLM."""
    chosen = parse(words)
    if more is None:
        import torch

        if not torch.cuda.is_available():
            print("error: torch sees no GPU: run this where it does, with a CUDA build of torch", file=sys.stderr)
            return 1
    options = more or {
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.4,
        "max_num_seqs": 256,
        "deterministic": chosen.deterministic,
    }
    failed = 0
    for kind in chosen.kinds or METHODS:
        pair = Pair(chosen.shape, kind, options)
        try:
            for count in chosen.sequences or [count for of, count in AIMS if of == kind]:
                found = pair.measure(count, chosen.rounds, chosen.output_tokens)
                print(json.dumps({"shape": chosen.shape, **found}), flush=True)
                failed += not found["same"]
        finally:
            pair.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
