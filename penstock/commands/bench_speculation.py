"""`penstock bench speculation`: the same requests with and without drafts, taking turns."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.bench_texts import SCHEMA, WORKLOADS, Workload
from penstock.commands.flags.options import Json, ModelOrDefault, open_llm
from penstock.commands.output import Table, write_text
from penstock.errors import InvalidConfig, InvalidRequest, quote
from penstock.hub.names import DEFAULT_MODEL
from penstock.types import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM

PROMPT_TOKENS = 40  # of random ones
Repetitions = Annotated[int, typer.Option("--repetitions", help="Different requests of each kind, after one warm-up.")]


@dataclass
class Measured:
    """One workload: tokens per second without and with drafts, request by request, and what became of drafts."""

    name: str
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    same: bool = True  # both gave the same tokens

    @property
    def speedup(self) -> float:
        return statistics.median(self.on) / statistics.median(self.off)


def speculation(
    model: ModelOrDefault = DEFAULT_MODEL,
    repetitions: Repetitions = 5,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Measure speculative decoding.

    Tokens per second of whole requests with and without drafts, taking turns; every request is new.
    """
    if not 1 <= repetitions <= 1000:
        raise InvalidRequest(f"--repetitions={quote(repetitions)} is out of range: it must be 1 to 1000")
    with open_llm(model, {**options, "speculative_config": "off"}) as off, open_llm(model, options) as on:
        drafting = next(setting for setting in on.settings if setting.name == "speculative_config")
        if drafting.value == "off":
            raise InvalidConfig(f"nothing is drafted: {drafting.why}")
        measured = [_measure(off, on, workload, repetitions) for workload in WORKLOADS]
    write_text(_document(measured) if as_json else _table(measured))


def _measure(off: LLM, on: LLM, workload: Workload, repetitions: int) -> Measured:
    from tqdm import tqdm

    measured = Measured(workload.name)
    bar = tqdm(
        range(repetitions + 1), desc=workload.name, file=sys.stderr, leave=False, disable=not sys.stderr.isatty()
    )
    for number in bar:
        pair = [off, on] if number % 2 else [on, off]
        answers = {}
        for llm in pair:
            before = llm.stats()
            seconds, answers[llm is on] = _run(llm, workload, number)
            if not number:
                continue
            count = sum(map(len, answers[llm is on]))
            (measured.on if llm is on else measured.off).append(count / seconds)
            if llm is on:
                after = llm.stats()
                measured.num_drafted += after["num_draft_tokens"] - before["num_draft_tokens"]
                measured.num_accepted += after["num_accepted_tokens"] - before["num_accepted_tokens"]
                measured.num_steps += after["num_steps"] - before["num_steps"]
                measured.num_tokens += count
        measured.same &= answers[True] == answers[False]
    return measured


def _run(llm: LLM, workload: Workload, number: int) -> tuple[float, list[tuple[int, ...]]]:
    """Run a workload's request of this number; returns its seconds and its tokens."""
    rng = random.Random(f"{workload.name} {number}")
    grammar = StructuredOutputsParams(json=SCHEMA) if workload.name == "structured" else None
    params = SamplingParams(
        max_tokens=workload.num_output,
        seed=number,
        ignore_eos=workload.make is None,
        structured_outputs=grammar,
        **workload.params,
    )
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    if workload.make is None:
        vocabulary = llm.service.assembly.spec.vocab_size
        prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(workload.num_seqs)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    elif (tokenizer := llm.service.assembly.tokenizer) is not None and tokenizer.chat_template:
        outputs = llm.chat([{"role": "user", "content": workload.make(rng)}], params, use_tqdm=False)
    else:
        outputs = llm.generate(workload.make(rng), params, use_tqdm=False)
    return time.perf_counter() - begin, [tuple(output.outputs[0].token_ids) for output in outputs]


def _table(measured: list[Measured]) -> str:
    table = Table("requests", "t/s off", "t/s on", "on / off", "accepted", "tokens per step", "same")
    for one in measured:
        accepted = f"{one.num_accepted / one.num_drafted:.0%}" if one.num_drafted else "no drafts"
        table.add(
            one.name,
            f"{statistics.median(one.off):.1f}",
            f"{statistics.median(one.on):.1f}",
            f"{one.speedup:.2f}",
            accepted,
            f"{one.num_tokens / max(1, one.num_steps):.2f}",
            "yes" if one.same else "NO",
        )
    return table.markdown(right=("t/s off", "t/s on", "on / off", "accepted", "tokens per step"))


def _document(measured: list[Measured]) -> str:
    rows = [{**vars(one), "speedup": one.speedup} for one in measured]
    return json.dumps({"workloads": rows}, indent=2) + "\n"
