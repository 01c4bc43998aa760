"""Several servers under the same load: `python -m bench.serving_compare servers.toml --workload burst-new-prefix`.

All are started and take turns, each idle while another is measured; a round begins with another server each time.
Prompts are the same for all servers of a round and new in every round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.bar import Bar
from bench.load.contest import markdown, summarize
from bench.load.document import header, now, write
from bench.load.options import add_options, check, trial_options
from bench.load.servers import Server, read_entries
from bench.load.table import notes
from bench.load.trial import ServerFailed, Trial, calibrate, server_version
from bench.load.words import TOKENS_PER_WORD
from bench.load.workload import WORKLOADS
from bench.quiet import busy_share
from bench.serving import sound

Document = dict[str, Any]


def _workloads(text: str) -> list[str]:
    for name in text.split(","):
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"workload {name!r} is unknown: choose from {', '.join(WORKLOADS)}")
    return text.split(",")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving_compare", description="Measure several servers under the same load."
    )
    parser.add_argument("servers", type=Path, help="TOML file; see bench/servers.example.toml")
    parser.add_argument("--only", help="comma list of servers (default: all of the file)")
    parser.add_argument(
        "--workload",
        type=_workloads,
        default=["burst-new-prefix", "burst-seen-prefix"],
        help=f"comma list of {', '.join(WORKLOADS)} (default: the first two)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="medians are taken over them (default: 3)")
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="start a server only when the one before has ended, instead of taking turns: where memory is short",
    )
    parser.add_argument("--logs", type=Path, help="folder for what the servers print (default: a temporary one)")
    add_options(parser)
    chosen = parser.parse_args(words)
    check(parser, chosen)
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    try:
        entries, absent = read_entries(chosen.servers)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.only:
        entries = [entry for entry in entries if entry.name in chosen.only.split(",")]
        absent = {name: why for name, why in absent.items() if name in chosen.only.split(",")}
    for name, why in absent.items():
        print(f"note: {name} is skipped: {why}", file=sys.stderr)
    if not entries:
        print(f"error: no server of {chosen.servers} can be measured", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, Bar("request") as bar:
        logs = chosen.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        contest = Contest(chosen, absent, bar, entries[0].name)
        contest.run([Server(entry, logs / f"{entry.name}.log") for entry in entries])
    print(markdown(contest.document))
    return 0 if contest.sound else 1


class Contest:
    """Everything learnt goes into `document`, which is written after each turn."""

    def __init__(self, chosen: argparse.Namespace, absent: dict[str, str], bar: Bar, first: str) -> None:
        self.chosen, self.bar = chosen, bar
        self.factor: float | None = chosen.tokens_per_word
        self.sound = True
        self.document: Document = header("serving_compare", busy_share(chosen.pause or 0.1)) | {
            "together": not chosen.one_at_a_time,
            "rounds": chosen.rounds,
            "seed": chosen.seed,
            "nonce": chosen.nonce,
            "first": first,
            "absent": absent,
            "servers": {},
            "turns": [],
            "rests": [],
            "failures": [],
            "notes": list(chosen.note),
            "summary": [],
        }

    def run(self, servers: Sequence[Server]) -> None:
        groups = [[server] for server in servers] if self.chosen.one_at_a_time else [list(servers)]
        for group in groups:
            try:
                running = [server for server in group if self._attempt(server, None, partial(self._start, server))]
                for workload in self.chosen.workload:
                    for number in range(self.chosen.rounds):
                        self._round(running, workload, number)
            finally:
                for server in group:
                    server.stop()
        self.document["notes"] += dict.fromkeys(
            f"{turn['server']}, {note}" for turn in self.document["turns"] for note in turn["notes"]
        )
        self.document |= {"complete": True, "ended": now()}
        self._write()

    def _round(self, running: Sequence[Server], workload: str, number: int) -> None:
        self.document["rests"].append(
            {"workload": workload, "round": number, "busy_share": busy_share(self.chosen.pause or 0.1)}
        )
        start = number % max(1, len(running))
        for server in [*running[start:], *running[:start]]:
            self._attempt(server, workload, partial(self._turn, server, workload, number))

    def _attempt(self, server: Server, workload: str | None, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except ServerFailed as error:
            self.sound = False
            self.document["failures"].append({"server": server.entry.name, "workload": workload, "error": str(error)})
            return False

    def _start(self, server: Server) -> None:
        self.bar.note(f"starting {server.entry.name}")
        server.start()
        self.document["servers"][server.entry.name] = {
            "version": server_version(server.target),
            "started_s": server.started_s,
            "url": server.entry.url,
            "model": server.entry.model,
        }
        self.factor = self.factor or calibrate(server.target, server.entry.model)

    def _turn(self, server: Server, workload: str, number: int) -> None:
        name = server.entry.name
        options = trial_options(workload, self.chosen, server.target)
        options["extra"] = {**server.entry.extra, **self.chosen.extra}
        trial = Trial(
            model=server.entry.model,
            tokens_per_word=self.factor or TOKENS_PER_WORD,
            begin=self.bar.begin,
            note=lambda text: self.bar.note(f"{name}: {text}, round {number + 1}"),
            advance=self.bar.advance,
            **options,
        )
        phases = trial.run(f"{self.chosen.nonce}/{self.chosen.seed}-{workload}-{number}")
        self.sound = self.sound and all(sound(row["figures"]) for row in phases)
        wrong = [row for row in phases if not sound(row["figures"]) or row["figures"]["errors"]]
        self.document["turns"].append(
            {"server": name, "workload": workload, "round": number, "phases": phases, "notes": notes(wrong, None)}
        )
        self.document["summary"] = summarize(self.document["turns"], self.document["first"])
        self._write()

    def _write(self) -> None:
        if self.chosen.output:
            write(self.chosen.output, self.document)


if __name__ == "__main__":
    sys.exit(main())
