"""The part that all drivers share: commands in, results out, and the watch that times a run.

    {"do": "load", "path": …, "threads": 2, …}      → {"ok": true, "load_s": …, "facts": {…}}
    {"do": "run", "prompts": [[…], …], …}           → {"ok": true, "first_s": …, "total_s": …, "num_outputs": […], …}
    {"do": "close"}                                 → ends the process

One line each, on standard input and output. What an engine prints goes to standard error. Only the standard library is
used here, so that this runs in any environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

ROOM = 64  # tokens of context beyond what the longest case needs
MOST_WORDS = 300  # characters of an error


@dataclass(frozen=True)
class Load:
    """What to load and what it must be able to hold."""

    path: str
    threads: int
    max_len: int  # longest prompt and answer of one sequence
    max_seqs: int
    max_tokens: int  # of all sequences of a case together
    cpu: str  # avx2, avx512 or native
    work: str  # a folder for what the engine converts
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    prompts: list[list[int]]
    num_output: int
    num_shared: int = 0  # tokens that all prompts begin with
    by_hand: bool = False  # the engine's user, not the engine, sees to it that these are computed once


class Watch:
    """Times a run. `count` after each step, for every sequence the tokens it has."""

    def __init__(self, num_seqs: int) -> None:
        self.counts = [0] * num_seqs
        self.num_steps = 0
        self.first_s: float | None = None  # when every sequence had a token
        self.num_first = 0  # tokens there were then
        self.total_s = 0.0
        self._start = time.perf_counter()

    def add(self, sequence: int, count: int = 1) -> None:
        self.counts[sequence] += count

    def step(self) -> None:
        now = time.perf_counter() - self._start
        self.num_steps += 1
        self.total_s = now
        if self.first_s is None and all(self.counts):
            self.first_s, self.num_first = now, sum(self.counts)

    def result(self) -> dict[str, Any]:
        return {
            "first_s": self.first_s,
            "total_s": self.total_s,
            "num_first": self.num_first,
            "num_outputs": self.counts,
            "num_steps": self.num_steps,
        }


class Peer(Protocol):
    """One engine with one model."""

    def facts(self) -> dict[str, Any]:
        """Version, and how the model is held."""

    def run(self, run: Run) -> Watch:
        """Answer all prompts greedily, exactly `num_output` tokens each."""


def serve(load: Callable[[Load], Peer]) -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "close":
            break
        try:
            if do == "load":
                start = time.perf_counter()
                peer = load(Load(**command))
                answer = {"load_s": time.perf_counter() - start, "facts": peer.facts()}
            elif peer is None:
                raise RuntimeError("nothing is loaded")
            elif do == "run":
                answer = peer.run(Run(**command)).result()
            else:
                answer = {"value": getattr(peer, do)(**command)}
            answer["ok"] = True
        except Exception as error:  # an engine may raise anything; the harness goes on without it
            traceback.print_exc()
            answer = {"ok": False, "error": " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # no engine's clean-up may hang or crash the end
