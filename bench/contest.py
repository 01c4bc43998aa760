"""One model's contest: every engine loaded, then round after round, case by case, one engine after the other."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases import Case, WrongLength, longest
from bench.engines import Engine, Places
from bench.process import EngineFailed, Process
from bench.quiet import REST_S, busy_share
from bench.summary import TOOL

Row = dict[str, Any]
TOOL_CASES = {"prefill-512": "n_prompt", "decode-128": "n_gen"}
HOST_STEPS = 65


@dataclass(frozen=True)
class Entry:
    """An engine on one file, or on a model in the engine's own form."""

    engine: Engine
    file: str
    model: str
    path: Path
    vocab_size: int


@dataclass(frozen=True)
class Settings:
    cpu: str
    threads: int
    repeat: int
    pause_s: float
    seed: int
    skip: frozenset[tuple[str, str]]  # (model, file or engine, case)
    work: Path
    options: Mapping[str, Mapping[str, Any]]  # by engine


@dataclass
class Contest:
    """Everything that is learnt about one model goes into the lists and `facts`."""

    entries: Sequence[Entry]
    cases: Sequence[Case]
    settings: Settings
    places: Places
    note: Callable[[str], None]
    advance: Callable[[int], None]
    samples: list[Row] = field(default_factory=list)
    facts: dict[str, Row] = field(default_factory=dict)
    hosts: list[Row] = field(default_factory=list)
    rests: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    def run(self) -> None:
        self._processes: dict[int, Process] = {}
        self._given_up: set[tuple[int, str, bool]] = set()
        try:
            for index, entry in enumerate(self.entries):
                self._attempt(index, entry, partial(self._load, index, entry))
            for case in self.cases:
                self._each(case, self._warm_up)
            for number in range(self.settings.repeat):
                self._look_around(number)
                for case in self.cases:
                    self._each(case, partial(self._measure, number), number)
            for index, entry in enumerate(self.entries):
                if entry.engine.name == "penstock":
                    self._attempt(index, entry, partial(self._host, index, entry))
        finally:
            for process in self._processes.values():
                process.close()

    def _look_around(self, number: int) -> None:
        """Whether anything else runs here; engines that do not sleep when they have nothing to do show as well."""
        self.note("at rest")
        time.sleep(self.settings.pause_s)
        self.rests.append(
            {
                "model": self.entries[0].model,
                "round": number,
                "busy_share": busy_share(REST_S if self.settings.pause_s else 0.1),
            }
        )

    def num_turns(self) -> int:
        return sum(len(self._turns(case)) for case in self.cases) * (1 + self.settings.repeat)

    def _turns(self, case: Case) -> list[tuple[int, Entry, bool]]:
        """Who runs a case; llama.cpp twice where a prefix can be shared by hand."""
        entries = [
            (index, entry)
            for index, entry in enumerate(self.entries)
            if not self.settings.skip & {(name, case.name) for name in (entry.model, entry.file, entry.engine.name)}
        ]
        return [
            (index, entry, by_hand)
            for index, entry in entries
            for by_hand in ([False, True] if entry.engine.name == "llamacpp" and case.num_shared else [False])
        ]

    def _each(self, case: Case, turn: Callable[[int, Entry, Case, bool], None], number: int = 0) -> None:
        """Every engine's turn at a case; each round begins with another one."""
        turns = self._turns(case)
        start = number % max(1, len(turns))
        for index, entry, by_hand in turns[start:] + turns[:start]:
            self.note(f"{entry.file} {case.name} {entry.engine.name}")
            if index in self._processes and (index, case.name, by_hand) not in self._given_up:
                time.sleep(self.settings.pause_s)  # for the threads of the one before to fall asleep
                if not self._attempt(index, entry, partial(turn, index, entry, case, by_hand), case):
                    self._given_up.add((index, case.name, by_hand))
            self.advance(1)

    def _attempt(self, index: int, entry: Entry, action: Callable[[], None], case: Case | None = None) -> bool:
        """An engine that fails is noted and not asked again for that case; one whose process ended, for no other."""
        try:
            action()
            return True
        except (EngineFailed, WrongLength) as error:
            process = self._processes.get(index)
            if process and (case is None or process.process.poll() is not None):
                process.close()
                del self._processes[index]
            self.failures.append(
                {
                    "file": entry.file,
                    "engine": entry.engine.name,
                    "case": case.name if case else None,
                    "error": str(error),
                }
            )
            return False

    def _load(self, index: int, entry: Entry) -> None:
        self.note(f"loading {entry.file} in {entry.engine.title}")
        settings = self.settings
        log = settings.work / f"{entry.engine.name}-{entry.file}.log"
        process = Process(entry.engine, self.places, settings.cpu, settings.threads, log)
        self._processes[index] = process
        answer = process.do(
            "load",
            path=str(entry.path),
            threads=settings.threads,
            max_len=longest(self.cases) + 64,
            max_seqs=max(case.num_seqs for case in self.cases),
            work=str(settings.work),
            max_tokens=max(case.num_tokens for case in self.cases),
            cpu=settings.cpu,
            options=settings.options.get(entry.engine.name, {}),
        )
        self.facts[f"{entry.engine.name} on {entry.file}"] = answer["facts"] | {"load_s": answer["load_s"]}

    def _ask(self, index: int, entry: Entry, case: Case, by_hand: bool, seed: str) -> Row:
        result = self._processes[index].do(
            "run",
            prompts=case.prompts(seed, entry.vocab_size),
            num_output=case.num_output,
            num_shared=case.num_shared,
            by_hand=by_hand,
        )
        case.check(result, entry.engine.name)
        return result

    def _warm_up(self, index: int, entry: Entry, case: Case, by_hand: bool) -> None:
        self._ask(index, entry, case.warm_up(), by_hand, f"{self.settings.seed}/warm-up")

    def _measure(self, number: int, index: int, entry: Entry, case: Case, by_hand: bool) -> None:
        seed = f"{self.settings.seed}/{number}"
        result = self._ask(index, entry, case, by_hand, seed)
        engine = entry.engine.name + ("-by-hand" if by_hand else "")
        self.samples.append(
            {
                "file": entry.file,
                "model": entry.model,
                "case": case.name,
                "engine": engine,
                "round": number,
                "seed": seed,
                "value": case.value(result),
                "first_s": result["first_s"],
                "total_s": result["total_s"],
                "num_first": result["num_first"],
                "num_output_tokens": sum(result["num_outputs"]),
                "num_steps": result["num_steps"],
            }
        )
        if entry.engine.name == "llamacpp" and not by_hand:
            self._tool(number, entry, case)

    def _host(self, index: int, entry: Entry) -> None:
        prompt = Case("host", 1, 1, 1, "decode").prompts(str(self.settings.seed), entry.vocab_size)[0]
        value = self._processes[index].do("host", prompt=prompt, num_output=HOST_STEPS)["value"]
        share = {"share": value["host_s"] / value["step_s"]} if value else {}
        self.hosts.append({"file": entry.file, **(value or {"absent": "the engine does not tell"}), **share})

    def _tool(self, number: int, entry: Entry, case: Case) -> None:
        """llama-bench on the same file, right after llama.cpp's own turn: the machine's speed changes with the hour."""
        program = self.places.libraries(self.settings.cpu) / TOOL
        if case.name not in TOOL_CASES or not program.exists():
            return
        self.note(f"{entry.file} {case.name} {TOOL}")
        time.sleep(self.settings.pause_s)
        lengths = {"n_prompt": 0, "n_gen": 0} | {TOOL_CASES[case.name]: _length(case)}
        words = [
            str(program),
            "-m",
            str(entry.path),
            "-t",
            str(self.settings.threads),
            "-r",
            "1",
            "-o",
            "json",
            "-p",
            str(lengths["n_prompt"]),
            "-n",
            str(lengths["n_gen"]),
        ]
        variables = self.places.variables(entry.engine, self.settings.cpu, self.settings.threads)
        ran = subprocess.run(words, env=variables, capture_output=True, text=True)
        if ran.returncode:
            self.failures.append(
                {
                    "file": entry.file,
                    "engine": TOOL,
                    "case": case.name,
                    "error": f"status {ran.returncode}: {ran.stderr.strip()[-200:]}",
                }
            )
            return
        speeds = [speed for result in json.loads(ran.stdout) for speed in result["samples_ts"]]
        self.samples.append(
            {
                "file": entry.file,
                "model": entry.model,
                "case": case.name,
                "engine": TOOL,
                "round": number,
                "value": statistics.median(speeds),
            }
        )


def _length(case: Case) -> int:
    return case.num_prompt if case.measure == "prefill" else case.num_output - 1
