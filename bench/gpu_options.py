"""The command line of the GPU benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_sets import DEFAULT_SHAPES, KINDS, LARGE, SHAPES


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not understood: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Output tokens per second on one GPU, "
        "random weights of real shapes, beside what the device could do at best.",
    )
    add = made.add_argument
    add(
        "--shape",
        dest="shapes",
        action="append",
        choices=list(SHAPES),
        help=f"may be repeated (default: {', '.join(DEFAULT_SHAPES)})",
    )
    add(
        "--set",
        "--case",
        "--kind",
        dest="kinds",
        action="append",
        choices=(*KINDS, *LARGE),
        help="request set; may be repeated (default: all but the large ones, which need --option max_num_seqs=1024)",
    )
    add("--quantization", choices=("fp8", "int8", "int4"), help="of the weights at load (default: none)")
    add("--kv-cache-dtype", metavar="DTYPE", help="how keys and values are stored (default: as the weights)")
    add("--adapters", type=int, default=0, metavar="N", help="rank-16 LoRA adapters that requests name in turn")
    add("--deterministic", action="store_true", help="exact kernels only: what that costs")
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other option of LLM, for instance enforce_eager=true; may be repeated",
    )
    add("--ready", action="store_true", help="start twice, without compiled kernels and with them")
    add("--no-counters", dest="counters", action="store_false", help="leave out the untimed run that is counted")
    add("--profile", action="store_true", help="trace some steps of each set kernel by kernel, untimed")
    add(
        "--score",
        type=int,
        default=0,
        nargs="?",
        const=8,
        metavar="N",
        help="score N (8) sequences with transformers; of quantized weights also the divergence from 16 bits",
    )
    add("--output", type=Path, help="the JSON file (default: bench/results/gpu-DATE.json)")
    add("--inside", metavar="JSON", help=argparse.SUPPRESS)
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    chosen = made.parse_args(words)
    if chosen.score < 0:
        made.error(f"--score {chosen.score} is out of range: it must be 0 or more")
    chosen.shapes = chosen.shapes or list(DEFAULT_SHAPES)
    chosen.kinds = chosen.kinds or list(KINDS)
    return chosen


def engine_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Of LLM, those that were given alone."""
    options = dict(chosen.option)
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(chosen, name) is not None:
            options[name] = getattr(chosen, name)
    if chosen.deterministic:
        options["deterministic"] = True
    return options
