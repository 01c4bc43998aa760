"""`penstock bench`: measure a model's speed, as a table like llama-bench's."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.bench_speculation import speculation
from penstock.commands.flags.command import Command
from penstock.commands.flags.options import RANKS, Json, ModelOrDefault, engine_options, open_llm
from penstock.commands.output import Table, write_note, write_text
from penstock.errors import InvalidRequest, quote
from penstock.hub.names import DEFAULT_MODEL

if TYPE_CHECKING:
    from penstock.api.llm import LLM

app = typer.Typer(help="Measure a model's speed on this machine.", no_args_is_help=True, rich_markup_mode=None)
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Length of each prompt, in the pp test.")]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help="Tokens to generate, in the tg test.")]
Repetitions = Annotated[int, typer.Option("--repetitions", help="Runs of each test, after one warm-up run.")]
MAX_COUNT = 1_000_000
MAX_ALL_TOKENS = 100_000_000
Prompts = Callable[[int], list[int]]
NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Prompts submitted at once.")]


@dataclass(frozen=True)
class Test:
    """`num_seqs` prompts at once, and which of their tokens count."""

    name: str
    num_seqs: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_counted: int


@dataclass(frozen=True)
class Outcome:
    test: Test
    times_s: list[float]

    @property
    def speeds(self) -> list[float]:
        return [self.test.num_counted / seconds for seconds in self.times_s]

    def milliseconds(self) -> list[float]:
        """Return milliseconds to the first token, or per generated token."""
        return [1000 * seconds / self.test.num_output_tokens for seconds in self.times_s]


@app.command(cls=Command)
@engine_options()
def throughput(
    model: ModelOrDefault = DEFAULT_MODEL,
    num_prompts: NumPrompts = 4,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    repetitions: Repetitions = 3,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Measure many prompts at once.

    Tokens per second of prefill (pp), decode (tg), and both together.
    """
    _check(num_prompts=num_prompts, prompt_tokens=prompt_tokens, output_tokens=output_tokens, repetitions=repetitions)
    both = Test(
        f"pp{prompt_tokens}+tg{output_tokens}",
        num_prompts,
        prompt_tokens,
        output_tokens,
        num_prompts * (prompt_tokens + output_tokens),
    )
    _measure(model, [*_tests(num_prompts, prompt_tokens, output_tokens), both], repetitions, as_json, options)


@app.command(cls=Command)
@engine_options()
def latency(
    model: ModelOrDefault = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    repetitions: Repetitions = 5,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Measure one prompt at a time.

    Milliseconds to the first token (pp) and per generated token (tg), and tokens per second.
    """
    _check(prompt_tokens=prompt_tokens, output_tokens=output_tokens, repetitions=repetitions)
    _measure(model, _tests(1, prompt_tokens, output_tokens), repetitions, as_json, options)


app.command(cls=Command)(engine_options(*RANKS)(speculation))


def _tests(num_seqs: int, prompt_tokens: int, output_tokens: int) -> list[Test]:
    return [
        Test(f"pp{prompt_tokens}", num_seqs, prompt_tokens, 1, num_seqs * prompt_tokens),
        Test(f"tg{output_tokens}", num_seqs, 1, output_tokens, num_seqs * output_tokens),
    ]


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if not 1 <= count <= MAX_COUNT:
            raise InvalidRequest(
                f"--{name.replace('_', '-')}={quote(count)} is out of range: it must be 1 to {MAX_COUNT}"
            )
    num_tokens = counts.get("num_prompts", 1) * (counts["prompt_tokens"] + counts["output_tokens"])
    if num_tokens > MAX_ALL_TOKENS:
        raise InvalidRequest(
            f"the prompts and answers have {num_tokens} tokens together; the limit is {MAX_ALL_TOKENS}: "
            "lower --num-prompts, --prompt-tokens or --output-tokens"
        )


def _measure(model: str, tests: list[Test], repetitions: int, as_json: bool, options: dict[str, Any]) -> None:
    options = {"speculative_config": "off", **options}  # these prompts repeat themselves as no text does
    with open_llm(model, options) as llm:
        prompts = fresh_prompts(llm.service.assembly.spec.vocab_size)
        outcomes = [_repeat(llm, test, repetitions, prompts) for test in tests]
        facts = _facts(llm)
    write_text(_document(facts, outcomes) if as_json else _table(facts, outcomes))
    write_note(_host_note(facts["stats"]))
    if facts["stats"]["num_draft_tokens"]:
        write_note(describe_drafts(facts["stats"]))
    if preempted := facts["stats"].get("num_preemptions"):
        write_note(f"note: {preempted} preemptions; a larger --kv-cache-tokens avoids them")


def _host_note(stats: dict[str, Any]) -> str:
    """Describe host time over all steps, warm-up included: step time minus forward pass."""
    host, steps = stats["step_s"] - stats["forward_s"], max(1, stats["num_steps"])
    return (
        f"host time: {1e6 * host / steps:.0f} µs of {1e3 * stats['step_s'] / steps:.2f} ms a step, "
        f"{1e6 * stats['sampling_s'] / steps:.0f} µs of it sampling"
    )


def describe_drafts(stats: dict[str, Any]) -> str:
    """Describe acceptance over all steps, warm-up included: in all, by place and by drafter."""
    drafted, drafts = stats["num_draft_tokens"], max(1, stats["num_drafts"])
    places = [stats[f"num_accepted_at_{place}"] for place in range(8)]
    shares = " ".join(f"{count / drafts:.0%}" for count in places if count)
    prefix = "num_draft_tokens_of_"
    names = sorted(name.removeprefix(prefix) for name in stats if name.startswith(prefix))
    by_drafter = ", ".join(
        f"{name} {stats[f'num_accepted_tokens_of_{name}']} of {stats[prefix + name]}" for name in names
    )
    return (
        f"drafts: {stats['num_accepted_tokens']} of {drafted} tokens accepted "
        f"({stats['num_accepted_tokens'] / drafted:.0%}; by place {shares or '0%'}); {by_drafter}"
    )


def _facts(llm: LLM) -> dict[str, Any]:
    """Collect the model, the machine and the engine's counters."""
    from penstock.commands.info import bytes_on_disk, version
    from penstock.models.files import open_checkpoint
    from penstock.ops import cpu

    assembly = llm.service.assembly
    facts = {
        "model": llm.model,
        "num_parameters": assembly.spec.num_parameters,
        "threads": cpu.num_threads(),
        "cpu_path": cpu.path(),
        "version": version(),
        "stats": llm.stats(),
        "settings": {setting.name: setting.value for setting in llm.settings},
    }
    if assembly.settings.load_format == "dummy":
        return facts | {"quantization": "dummy", "num_bytes": 0}
    checkpoint = open_checkpoint(assembly.path)
    try:
        return facts | {"quantization": checkpoint.quantization, "num_bytes": bytes_on_disk(assembly.path)}
    finally:
        checkpoint.close()


def fresh_prompts(vocab_size: int) -> Prompts:
    """Make prompts of random tokens that were never seen, so that none is in the prefix cache."""
    import random

    source = random.Random()
    return lambda length: [source.randrange(vocab_size) for _ in range(length)]


def _repeat(llm: Any, test: Test, repetitions: int, prompts: Prompts) -> Outcome:
    from tqdm import tqdm

    bar = tqdm(range(repetitions + 1), desc=test.name, file=sys.stderr, leave=False, disable=not sys.stderr.isatty())
    times = [_run(llm, test, prompts) for _ in bar]
    return Outcome(test, times[1:])


def _run(llm: Any, test: Test, prompts: Prompts) -> float:
    from penstock.types import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=test.num_output_tokens, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": prompts(test.num_prompt_tokens)} for _ in range(test.num_seqs)]
    start = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    return time.perf_counter() - start


def _table(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Format as a table; milliseconds are for one prompt and left out for several at once."""
    from penstock.commands.info import readable_count

    with_ms = all(outcome.test.num_seqs == 1 for outcome in outcomes)
    table = Table("model", "size", "params", "threads", "seqs", "test", "t/s", *(["ms"] if with_ms else []))
    for outcome in outcomes:
        ms = [_spread(outcome.milliseconds())] if with_ms else []
        table.add(
            f"{Path(facts['model']).name} {facts['quantization']}",
            f"{facts['num_bytes'] / 2**20:.2f} MiB",
            readable_count(facts["num_parameters"]),
            str(facts["threads"]),
            str(outcome.test.num_seqs),
            outcome.test.name,
            _spread(outcome.speeds),
            *ms,
        )
    return table.markdown(right=("size", "params", "threads", "seqs", "test", "t/s", "ms"))


def _spread(values: list[float]) -> str:
    return "{:.2f} ± {:.2f}".format(*mean_and_deviation(values))


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    import statistics

    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _document(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    tests = []
    for outcome in outcomes:
        mean, deviation = mean_and_deviation(outcome.speeds)
        tests.append(
            {
                "test": outcome.test.name,
                "num_seqs": outcome.test.num_seqs,
                "num_prompt_tokens": outcome.test.num_prompt_tokens,
                "num_output_tokens": outcome.test.num_output_tokens,
                "times_s": outcome.times_s,
                "tokens_per_s": mean,
                "tokens_per_s_sd": deviation,
            }
        )
    return json.dumps({**facts, "tests": tests}, indent=2, default=str) + "\n"
