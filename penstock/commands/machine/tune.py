"""`penstock tune`: find settings for a workload by running it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.commands.flags.options import RANKS, Json, Model, config_options, engine_options
from penstock.commands.output import write_note, write_text
from penstock.config import EngineConfig, check_options, option

if TYPE_CHECKING:
    from penstock.api.tune.search import Search, Trial

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `penstock tune` beside the engine's."""

    aim: str = option("throughput", "throughput, or limits in ms to keep, such as ttft=200,tpot=30")
    concurrency: int = option(16, "requests at once", least=1, most=65535)
    prompt_tokens: int = option(256, "tokens of a prompt", least=1, most=MAX_TOKENS)
    output_tokens: int = option(64, "tokens of an answer", least=1, most=MAX_TOKENS)
    trials: int = option(16, "settings to try at most", least=2, most=1000)
    repeats: int = option(3, "runs of each; more find smaller gains", least=2, most=100)

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def from_options(cls, **options: Any) -> TuneOptions:
        return cls(**options)


@config_options(TuneOptions, "wanted")
@engine_options(
    *("skip_tokenizer_init", "chat_template", "parse_special_tokens", "generation_config", "tokenizer"), *RANKS
)
def tune(model: Model, as_json: Json = False, *, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Find settings for a workload by running it.

    Settings that change no answer are tried one after the other. Flags are recommended only if their gain, measured
    again in turn with the start, is larger than the noise of the runs. Ctrl-C ends the search and keeps the best so
    far. Options that you give are kept as they are.
    """
    from penstock.api.tune.search import Search, parse_aim
    from penstock.api.tune.workload import Bench, Requests, find_knobs
    from penstock.ops import cpu

    asked = TuneOptions.from_options(**wanted)
    aim, requests = parse_aim(asked.aim), Requests(asked.concurrency, asked.prompt_tokens, asked.output_tokens)
    is_gpu = _has_gpu(options)
    knobs = {
        name: values
        for name, values in find_knobs(cpu.available_cores(), requests, is_gpu).items()
        if name not in options
    }
    bench = Bench(model, requests)
    search = Search(bench.measure, aim, knobs, asked.trials, asked.repeats, _tell)
    is_interrupted = False
    try:
        search.run(options)
    except KeyboardInterrupt:
        if search.start is None:
            raise
        is_interrupted = True
        write_note("interrupted: this is the best so far, not measured again")
    finally:
        bench.close()
    write_text(_document(search, is_interrupted) if as_json else _report(search))


def _has_gpu(options: dict[str, Any]) -> bool:
    import torch

    return options.get("device", "auto") != "cpu" and torch.cuda.is_available()


def _tell(trial: Trial, is_best: bool) -> None:
    write_note(f"{_flags(trial.options) or 'as given'}: {_figures(trial)}{', the best so far' if is_best else ''}")


def _figures(trial: Trial) -> str:
    from statistics import median

    runs = trial.runs
    speed, ttft_ms, tpot_ms = (
        median(getattr(run, name) for run in runs) for name in ("tokens_s", "ttft_ms", "tpot_ms")
    )
    return f"{speed:.1f} tokens/s, first token {ttft_ms:.0f} ms, then {tpot_ms:.1f} ms each"


def _flags(options: dict[str, Any], base: dict[str, Any] | None = None) -> str:
    changed = {name: value for name, value in options.items() if base is None or base.get(name) != value}
    defaults = EngineConfig()
    return " ".join(
        (f"--{name}" if value else f"--no-{name}").replace("_", "-")
        if isinstance(getattr(defaults, name), bool)
        else f"--{name.replace('_', '-')} {value}"
        for name, value in changed.items()
    )


def _report(search: Search) -> str:
    from penstock.api.tune.search import find_gain

    assert search.start is not None and search.best is not None
    lines = [f"as given: {_figures(search.start)}"]
    if not search.is_gain:
        lines.append(f"no setting of {search.num_trials} tried is better by more than the noise: keep what you have")
        return "\n".join(lines) + "\n"
    gain, noise = find_gain(search.best, search.start)
    lines.append(f"best:     {_figures(search.best)}")
    lines.append(
        f"gain:     {_gain(search, gain)}, noise {noise:.0%}{'' if search.is_confirmed else ', not confirmed'}"
    )
    lines.append(f"flags:    {_flags(search.best.options, search.start.options)}")
    return "\n".join(lines) + "\n"


def _gain(search: Search, gain: float) -> str:
    assert search.start is not None and search.best is not None
    if search.start.score < 1.0 <= search.best.score:
        return "the limits are kept now"
    return f"{gain:.0%} nearer to the limits" if search.best.score < 1.0 else f"{gain:.0%}"


def _document(search: Search, is_interrupted: bool) -> str:
    from penstock.api.tune.search import find_gain

    assert search.start is not None and search.best is not None
    gain, noise = find_gain(search.best, search.start)
    best = search.best if search.is_gain else search.start
    facts = {
        "flags": _flags(best.options, search.start.options),
        "options": best.options,
        "gain": round(gain, 4) if search.is_gain else 0.0,
        "noise": round(noise, 4),
        "confirmed": search.is_confirmed,
        "interrupted": is_interrupted,
        "trials": search.num_trials,
        "before": [asdict(run) for run in search.start.runs],
        "after": [asdict(run) for run in best.runs],
    }
    return json.dumps(facts, indent=2) + "\n"
