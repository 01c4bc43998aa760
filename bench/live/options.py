"""The command line of `bench.gpu_serving`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_sets import SHAPES, VOCABULARY
from bench.live.cases import CASES, READY, Settings, find_case

QUICK = {"num_rounds": 1, "num_repeats": 3, "seconds": 20.0}
POSITIVE = ("clients", "rounds", "scale", "seconds", "start_timeout", "timeout", "tpot_slo_ms", "ttft_slo_ms")


def _case(name: str) -> str:
    if name != READY and find_case(name) is None:
        raise argparse.ArgumentTypeError(f"{name!r} is no case: choose from {', '.join([READY, *CASES])} or rate-N")
    return name


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object: write {{"name": value}}')
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu_serving",
        description="Measure a server on a GPU under live traffic: Penstock's own, or any with OpenAI's API.",
    )
    server = made.add_argument_group("server").add_argument
    server("--shape", choices=list(SHAPES), default="llama-3.1-8b", help="random weights of it (default: %(default)s)")
    server("--device", default="cuda", help="of our server (default: cuda)")
    server("--serve-options", default="", metavar="WORDS", help='more for penstock serve: "--quantization fp8"')
    server("--url", help="measure the server there instead of starting one")
    server("--model", help="name that it knows; needed with --url")
    server("--api-key", help="sent as a bearer token; it is not written anywhere")
    server("--label", help="name of the server in the results (default: penstock, or the URL)")
    server("--start-timeout", type=float, default=600.0, help="seconds until it must be ready (default: 600)")
    server("--log", type=Path, help="file for our server's log, of its last start (default: it is not kept)")
    server("--write-folder", type=Path, help="write the shape's folder for another engine's server, and end")
    traffic = made.add_argument_group("traffic").add_argument
    traffic(
        "--case",
        dest="cases",
        action="append",
        type=_case,
        metavar="NAME",
        help="may be repeated; rate-N too (default: all)",
    )
    traffic("--quick", action="store_true", help="20 s per rate and one round of each burst")
    traffic("--scale", type=float, default=1.0, help="of request numbers, lengths and durations, to try it on a CPU")
    traffic("--seconds", type=float, help="of arrivals per rate (default: 60)")
    traffic("--rounds", type=int, help="of each burst of 256, the fastest counts (default: 2)")
    traffic("--temperature", type=float, default=1.0, help="(default: 1)")
    traffic("--greedy", dest="temperature", action="store_const", const=0.0, help="--temperature 0")
    traffic("--ttft-slo-ms", type=float, help="aim of a good request (default: the rate's own)")
    traffic("--tpot-slo-ms", type=float, help="aim of a good request (default: the rate's own)")
    traffic("--vocabulary", type=int, default=VOCABULARY, help="prompts are ids below it (default: %(default)s)")
    traffic("--seed", type=int, default=0, help="of the arrivals (default: 0)")
    traffic("--clients", type=int, default=4, help="processes that send (default: 4)")
    traffic("--timeout", type=float, default=300.0, help="seconds until a request is given up (default: 300)")
    traffic("--extra", type=_object, default={}, metavar="JSON", help="more fields for the requests' bodies")
    output = made.add_argument_group("output").add_argument
    output("--output", type=Path, help="file for the lines of JSON as well")
    output("--plot", type=Path, metavar="FILE", help="draw TTFT and TPOT by rate from result files, and end")
    output("results", nargs="*", type=Path, help="files of --output, for --plot")
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    chosen = made.parse_args(words)
    for name in POSITIVE:
        value = getattr(chosen, name)
        if value is not None and value <= 0:
            made.error(f"--{name.replace('_', '-')} {value} is out of range: it must be more than 0")
    if chosen.url and not chosen.model:
        made.error("--url needs --model: the name by which that server knows its model")
    if bool(chosen.plot) != bool(chosen.results):
        made.error("--plot FILE and files of results go together")
    if chosen.plot and chosen.plot.suffix not in (".svg", ".png"):
        made.error(f"--plot {chosen.plot} is no picture: it must end in .svg or .png")
    if chosen.output and chosen.output.exists():
        made.error(f"{chosen.output} exists: two runs are never mixed; choose another --output")
    chosen.cases = sorted(dict.fromkeys(chosen.cases or [READY, *CASES]), key=_rank)
    return chosen


def _rank(name: str) -> int:
    """Put cases that want a fresh server first, as one that runs already cannot be started again."""
    case = find_case(name)
    return 0 if case is None else 1 if case.fresh else 2


def settings(chosen: argparse.Namespace) -> Settings:
    given = {"num_rounds": chosen.rounds, "seconds": chosen.seconds}
    values: dict[str, Any] = QUICK if chosen.quick else {}
    values = values | {name: value for name, value in given.items() if value is not None}
    return Settings(scale=chosen.scale, aims_ms=(chosen.ttft_slo_ms, chosen.tpot_slo_ms), **values)
