"""How long until the first token: `python -m bench.start [MODEL] [options of penstock run]`.

A round starts `penstock run` in a fresh process and waits for the first byte of the answer. Further processes run the
same command with a clock around each part of the start. Parts overlap: the tokenizer is built while weights load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

PROMPT = "Why is the sky blue?"
IMPORTS = "commands", "torch", "engine"
PARTS = [  # what a part is called, and the function that does it
    ("files", "penstock.api.assemble.open_checkpoint"),
    ("tokenizer", "penstock.api.assemble.load_in_sandbox"),
    ("weights", "penstock.api.engine.load.load_lowered"),
    ("cache", "penstock.api.assemble.start_engine"),
    ("prompt", "penstock.text.intake.Intake.encode"),
    ("prompt", "penstock.text.intake.Intake.encode_messages"),
    ("first step", "penstock.engine.engine.Engine.step"),
]
Spans = dict[str, tuple[float, float]]  # seconds from the start of the process


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description="Time to the first token.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeat", type=int, default=5, help="rounds [default: 5]")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    chosen, options = parser.parse_known_args(words)
    command = ["run", chosen.model, PROMPT, "--max-tokens=1", "--temperature=0", *options]
    rounds = [(first_byte_s(command), spans(command)) for _ in range(chosen.repeat)]
    times = [seconds for seconds, _ in rounds]
    parts = _medians([found for _, found in rounds])
    if chosen.json:
        print(
            json.dumps(
                {"model": chosen.model, "first_byte_s": times, "median_s": statistics.median(times), "spans_s": parts}
            )
        )
        return 0
    print(
        f"{chosen.model}: {statistics.median(times):.2f} s to the first byte, median of {len(times)} "
        f"({min(times):.2f} to {max(times):.2f})"
    )
    for name, (begin, end) in parts.items():
        print(f"  {name:12} {end - begin:6.3f} s   from {begin:5.2f} to {end:5.2f}")
    return 0


def first_byte_s(words: Sequence[str]) -> float:
    command = [sys.executable, "-m", "penstock", *words]
    begin = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        byte = process.stdout.read(1)
        seconds = time.monotonic() - begin
        errors = process.stderr.read().decode()
    if not byte:
        raise SystemExit(errors.strip())
    return seconds


def spans(words: Sequence[str]) -> Spans:
    """The parts of one start, in the order in which they begin."""
    code = f"from bench.start import child; child({list(words)!r}, {time.monotonic()!r})"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    found: Spans = json.loads(done.stderr.splitlines()[-1])
    return dict(sorted(found.items(), key=lambda span: span[1]))


def child(words: list[str], begin: float) -> None:
    """Run the command in this process; the spans go to standard error. The monotonic clock is the machine's own."""
    found: Spans = {"python": (0.0, time.monotonic() - begin)}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            start = time.monotonic()
            try:
                return function(*values, **named)
            finally:
                found.setdefault(name, (start - begin, time.monotonic() - begin))

        return call

    for name, module in zip(IMPORTS, ("penstock.cli", "torch", "penstock.api.llm")):
        timed(name, import_module)(module)
    for name, path in PARTS:
        owner, attribute = _owner(path)
        setattr(owner, attribute, timed(name, getattr(owner, attribute)))
    status = import_module("penstock.cli").main(words)
    print(json.dumps(found), file=sys.stderr)
    sys.exit(status)


def _owner(path: str) -> tuple[Any, str]:
    """The module or class that holds a function, and its name there."""
    parent, _, attribute = path.rpartition(".")
    try:
        return import_module(parent), attribute
    except ModuleNotFoundError:
        module, _, name = parent.rpartition(".")
        return getattr(import_module(module), name), attribute


def _medians(rounds: list[Spans]) -> Spans:
    median = statistics.median
    return {
        name: (
            median(found[name][0] for found in rounds if name in found),
            median(found[name][1] for found in rounds if name in found),
        )
        for name in rounds[0]
    }


if __name__ == "__main__":
    sys.exit(main())
