"""What the command lines of `bench.serving` and `bench.serving_compare` have in common."""

from __future__ import annotations

import argparse
import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.load.figures import Limits
from bench.load.loop import Pace
from bench.load.wire import Target
from bench.load.words import TOKENS_PER_WORD
from bench.load.workload import WORKLOADS, Workload

OVERLOAD = 2.0
POSITIVE = (
    "concurrency",
    "rate",
    "requests",
    "input_len",
    "output_len",
    "overload",
    "capacity",
    "tokens_per_word",
    "max_ttft",
    "max_tpot",
    "timeout",
    "rounds",
)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object: write {{"name": value}}')
    return value


def _seconds(milliseconds: str) -> float:
    return float(milliseconds) / 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=int, help="closed loop: so many requests at any time (default: 16)")
    pace.add_argument("--rate", type=float, help="open loop: so many requests a second, answered or not")
    add("--arrival", choices=("poisson", "uniform"), default="poisson", help="of an open loop (default: poisson)")
    add("--overload", type=float, help=f"workload overload: offer so many times the capacity (default: {OVERLOAD:g})")
    add(
        "--capacity",
        type=float,
        help="workload overload: requests a second that count as the capacity, instead of "
        "measuring it in a closed loop first",
    )
    add("--requests", type=int, help="how many (default: the workload's own)")
    add("--prefix-len", type=int, help="tokens of the system prompt common to all (default: the workload's own)")
    add("--input-len", type=int, help="tokens of each user's message (default: the workload's own)")
    add("--output-len", type=int, help="tokens of each answer (default: the workload's own)")
    add(
        "--seen",
        type=int,
        default=1,
        help="workload burst-seen-prefix: requests with the same system prompt that are "
        "sent before (default: 1; a server that keeps a cache per slot needs one per slot)",
    )
    add("--warm-up", type=int, default=1, help="requests with other prompts, sent first and not counted (default: 1)")
    add(
        "--max-ttft",
        type=float,
        default=Limits.ttft_s,
        help=f"seconds to the first token that a good request may take (default: {Limits.ttft_s:g})",
    )
    add(
        "--max-tpot",
        type=float,
        default=Limits.tpot_s,
        help=f"seconds per further token that a good request may take (default: {Limits.tpot_s:g})",
    )
    for name, first in (("ttft", "the first token"), ("tpot", "each further one")):
        add(
            f"--{name}-slo-ms",
            dest=f"max_{name}",
            type=_seconds,
            default=argparse.SUPPRESS,
            metavar="MS",
            help=f"--max-{name} in milliseconds: time to {first}",
        )
    add(
        "--tokens-per-word",
        type=float,
        help=f"how text is cut to length (default: by the server's /tokenize, or {TOKENS_PER_WORD:g})",
    )
    add("--timeout", type=float, default=600.0, help="seconds until a request is given up (default: 600)")
    add("--pause", type=float, default=0.5, help="seconds of rest before each measurement (default: 0.5)")
    add("--seed", type=int, default=0, help="prompts and arrivals are drawn from it and from --nonce")
    add(
        "--nonce",
        default=None,
        help="stands at the start of every prompt, so that no server has seen it (default: random)",
    )
    add("--extra", type=_object, default={}, metavar="JSON", help="more fields for the requests' bodies")
    add("--note", action="append", default=[], help="a sentence to keep with the results; may be repeated")
    add("--output", type=Path, default=None, help="the JSON file with every sample (default: none is written)")


def check(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Ends the program with a message when an option is out of range; makes up the nonce."""
    for name in POSITIVE:
        value = getattr(chosen, name, None)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range: it must be more than 0")
    if chosen.output and chosen.output.exists():
        parser.error(f"{chosen.output} exists: two runs are never mixed; choose another --output")
    chosen.nonce = chosen.nonce or secrets.token_hex(4)


def workload(name: str, chosen: argparse.Namespace) -> Workload:
    given = {
        "num_requests": chosen.requests,
        "num_prefix": chosen.prefix_len,
        "num_input": chosen.input_len,
        "num_output": chosen.output_len,
        "concurrency": chosen.concurrency,
    }
    return replace(WORKLOADS[name], **{key: value for key, value in given.items() if value is not None})


def trial_options(name: str, chosen: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Arguments of a `Trial`, all but the model and what shows progress."""
    asked = workload(name, chosen)
    overload = (chosen.overload or OVERLOAD) if name == "overload" else None
    pace = Pace(
        None if chosen.rate else asked.concurrency,
        None if overload else chosen.rate,
        chosen.arrival,
        f"{chosen.nonce}/{chosen.seed}",
    )
    return {
        "target": target,
        "workload": asked,
        "pace": pace,
        "limits": Limits(chosen.max_ttft, chosen.max_tpot),
        "overload": overload,
        "capacity": chosen.capacity,
        "num_warm": chosen.warm_up,
        "num_seen": chosen.seen,
        "timeout_s": chosen.timeout,
        "pause_s": chosen.pause,
        "extra": chosen.extra,
    }
