"""The command line of the CPU benchmark."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.engines import CPUS, ENGINES
from bench.models import DEFAULT_FILES, FILES, default_folder

QUICK = 8  # cases are made so many times smaller


def _names(known: Sequence[str], what: str, paths: bool = False) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known and not (paths and Path(name).exists()):
                raise argparse.ArgumentTypeError(f"{what} {name!r} is unknown: choose from {', '.join(known)}")
        return names

    return parse


def _skips(text: str) -> frozenset[tuple[str, str]]:
    pairs = [tuple(pair.split(":")) for pair in text.split(",") if pair]
    known = {*ENGINES, *FILES, *(file.model for file in FILES.values())}
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in known or pair[1] not in CASES:
            raise argparse.ArgumentTypeError(
                f"{':'.join(pair)!r} is not understood: write MODEL:CASE, FILE:CASE or ENGINE:CASE"
            )
    return frozenset((pair[0], pair[1]) for pair in pairs)


def _option(text: str) -> tuple[str, str, Any]:
    place, equals, value = text.partition("=")
    engine, dot, name = place.partition(".")
    if not equals or not dot or engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood: write ENGINE.NAME=VALUE")
    try:
        return engine, name, json.loads(value)
    except ValueError:
        return engine, name, value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.cpu",
        description="Measure Penstock and its peers on the same files in one run, taking turns.",
    )
    add = made.add_argument
    add(
        "--files",
        type=_names(tuple(FILES), "file", paths=True),
        default=list(DEFAULT_FILES),
        help=f"comma list of {', '.join(FILES)}, or paths of models of your own (default: all but smollm2-q4_0)",
    )
    add("--cases", type=_names(tuple(CASES), "case"), default=list(CASES), help=f"comma list of {', '.join(CASES)}")
    add(
        "--engines",
        type=_names(tuple(ENGINES), "engine"),
        default=list(ENGINES),
        help=f"comma list of {', '.join(ENGINES)}; one that is not installed is skipped with a note",
    )
    add(
        "--skip",
        type=_skips,
        default=frozenset(),
        metavar="WHAT:CASE",
        help="comma list of a model's, a file's or an engine's cases to leave out, e.g. llama-1b:shared-16",
    )
    add("--everywhere", action="store_true", help="measure every engine on every model it reads, however slow")
    add("--cpu", choices=CPUS, default="native", help="instruction set that all engines are held to (default: native)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each engine (default: all cores)")
    add("--repeat", type=int, default=5, help="rounds; medians are taken over them (default: 5)")
    add("--seed", type=int, default=0, help="prompts are drawn from it")
    add("--pause", type=float, default=0.5, help="seconds of rest before each turn (default: 0.5)")
    add("--quick", action="store_true", help="one round of small cases, to try out the harness: no measurement")
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="ENGINE.NAME=VALUE",
        help="an option of an engine, e.g. penstock.kv_cache_dtype=int8; may be repeated",
    )
    add("--note", action="append", default=[], help="a sentence to keep with the results; may be repeated")
    add("--folder", type=Path, default=None, help=f"where model files are made (default: {default_folder()})")
    add("--peers", type=Path, default=None, help="where the peers' environments are (default: peers in --folder)")
    add(
        "--output",
        type=Path,
        default=None,
        help="the JSON file; a table goes beside it (default: bench/results/cpu-DATE-CPU.json)",
    )
    add("--plot", type=Path, default=None, help="the plot (default: docs/bench-cpu-CPU.svg; with --output beside it)")
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    chosen = made.parse_args(words)
    for name in ("threads", "repeat"):
        if getattr(chosen, name) < 1:
            made.error(f"--{name} {getattr(chosen, name)} is out of range: it must be 1 or more")
    if chosen.quick:
        chosen.repeat, chosen.pause = 1, 0.0
    chosen.folder = chosen.folder or default_folder()
    chosen.peers = chosen.peers or chosen.folder / "peers"
    return chosen


def engine_options(chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for engine, name, value in chosen.option:
        found.setdefault(engine, {})[name] = value
    return found
