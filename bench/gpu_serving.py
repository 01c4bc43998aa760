"""A GPU server under live traffic: `python -m bench.gpu_serving`, or with `--url` and `--model` any server's.

Our server is started here, as `penstock serve` on random weights of a real shape. All requests go over HTTP to
/v1/completions, streamed, with prompts of random token ids. One line of JSON per case on standard output and in
`--output`; a table at the end. `--plot FILE` draws latencies by rate from such files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from bench import limits
from bench.live.cases import READY, find_case
from bench.live.clients import Clients
from bench.live.folder import write_folder
from bench.live.options import parse, settings
from bench.live.report import table
from bench.live.server import OtherServer, OwnServer, gpu_name
from bench.live.traffic import Traffic
from bench.load.trial import ServerFailed, server_version
from bench.process import ROOT

Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    if chosen.plot:
        return plot(chosen)
    if chosen.write_folder:
        write_folder(chosen.shape, chosen.write_folder)
        return 0
    try:
        run = Run(chosen)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = False
    try:
        with Clients(chosen.clients) as clients:
            run.measure(clients)
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        failed = True
    finally:
        run.server.close()
    print(table(run.rows), file=sys.stderr, flush=True)
    return 1 if failed or any(row.get("num_ok") != row.get("num_requests") for row in run.rows) else 0


def plot(chosen: argparse.Namespace) -> int:
    from bench.live.plot import draw, read

    try:
        draw(read(chosen.results), chosen.plot)
    except ImportError as error:
        print(f"error: no plot was drawn ({error}); pip install 'penstock[bench]'", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: no plot was drawn: {error}", file=sys.stderr)
        return 1
    return 0


class Run:
    """All chosen cases on one server. `rows` holds the lines so far."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.settings = settings(chosen)
        self.rows: list[Row] = []
        self.server: OwnServer | OtherServer
        if chosen.url:
            self.server = OtherServer(chosen.url, chosen.model, chosen.api_key, chosen.start_timeout)
        else:
            options = ["--device", chosen.device, *shlex.split(chosen.serve_options)]
            self.server = OwnServer(chosen.shape, options, chosen.start_timeout, chosen.log)
        self._facts: Row = {}

    def measure(self, clients: Clients) -> None:
        print("waiting for the server" if self.chosen.url else "starting the server", file=sys.stderr, flush=True)
        ready_s = self.server.start()
        self._facts = self._describe()
        if READY in self.chosen.cases:
            self._report(READY, {"ready_s": round(ready_s, 2)})
        for name in self.chosen.cases:
            if name != READY:
                self._measure_case(name, clients)

    def _measure_case(self, name: str, clients: Clients) -> None:
        case = find_case(name)
        assert case is not None
        started: Row = {}
        if case.fresh and not self.server.is_fresh and isinstance(self.server, OwnServer):
            started = {"restarted_s": round(self.server.start(), 2)}
        print(f"{name}: {case.title}", file=sys.stderr, flush=True)
        fresh = {"fresh": self.server.is_fresh} if case.fresh else {}
        self.server.is_fresh = False
        figures = case.run(self._traffic(clients), self.settings)
        self._report(name, {**fresh, **started, **figures})
        self.server.check()

    def _traffic(self, clients: Clients) -> Traffic:
        chosen = self.chosen
        return Traffic(
            clients,
            self.server.target,
            self.server.model,
            chosen.vocabulary,
            chosen.temperature,
            chosen.seed,
            chosen.timeout,
            chosen.extra,
        )

    def _describe(self) -> Row:
        """Fields that every line has: the server and the run."""
        chosen = self.chosen
        facts: Row = {
            "server": chosen.label or chosen.url or "penstock",
            "version": server_version(self.server.target),
            "model": self.server.model,
            "device": gpu_name(),
            "date": datetime.date.today().isoformat(),
            **limits.commit(ROOT),
            "temperature": chosen.temperature,
        }
        if not chosen.url and chosen.serve_options:
            facts["serve_options"] = chosen.serve_options
        if chosen.scale != 1:
            facts["scale"] = chosen.scale
        return facts

    def _report(self, name: str, figures: Row) -> None:
        row = {"case": name, **self._facts, **figures}
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.chosen.output:
            self.chosen.output.parent.mkdir(parents=True, exist_ok=True)
            with self.chosen.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # our server must end with us
    sys.exit(main())
