"""Penstock and its peers on this machine's CPU: `python -m bench.cpu`, or `make bench-cpu`.

All engines of a model are loaded, and take turns case by case and round by round, so that whatever the machine does
meanwhile happens to all of them. Every figure in the tables comes from the one JSON file that a run writes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import limits, models
from bench.bar import Bar
from bench.cases import CASES, Case
from bench.contest import Contest, Entry, Settings
from bench.engines import ENGINES, Places
from bench.options import QUICK, engine_options, parse
from bench.plot import draw
from bench.process import ROOT
from bench.report import markdown
from bench.summary import summarize, target_rows, tool_checks

Document = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    output = chosen.output or _free_path(ROOT / "bench" / "results", chosen.cpu)
    if output.exists():
        print(f"error: {output} exists: two runs are never mixed; choose another --output", file=sys.stderr)
        return 1
    document = run(chosen, output)
    show(
        document,
        output,
        chosen.plot or (output.with_suffix(".svg") if chosen.output else ROOT / "docs" / f"bench-cpu-{chosen.cpu}.svg"),
    )
    return 1 if any(failure["engine"] == "penstock" for failure in document["failures"]) else 0


def show(document: Document, output: Path, picture: Path) -> None:
    table = markdown(document)
    output.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    try:
        draw(document, picture)
    except ImportError as error:
        print(f"note: no plot was drawn ({error}); pip install 'penstock[bench]'", file=sys.stderr)


def run(chosen: argparse.Namespace, output: Path) -> Document:
    """Measure; the document is written after each model, so that nothing is lost when a later one fails."""
    cases = [CASES[name].shrunk(QUICK) if chosen.quick else CASES[name] for name in chosen.cases]
    places = Places(chosen.peers)
    absent = {name: note for name in chosen.engines if (note := places.absence(ENGINES[name], chosen.cpu))}
    work = chosen.folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        chosen.cpu, chosen.threads, chosen.repeat, chosen.pause, chosen.seed, chosen.skip, work, engine_options(chosen)
    )
    with Bar("turn") as bar:
        entries, files = _entries(chosen, absent, bar)
        bar.note("measuring the machine's limits")
        megabytes = [-(-file["decode_bytes"] // 1_000_000) for file in files.values()]
        document = _header(chosen, absent, files)
        document["limits"] = limits.measure(chosen.threads, chosen.cpu, megabytes, 0.1 if chosen.quick else 1.0)
        contests = [
            Contest([e for e in entries if e.model == model], cases, settings, places, bar.note, bar.advance)
            for model in dict.fromkeys(entry.model for entry in entries)
        ]
        bar.begin(sum(contest.num_turns() for contest in contests))
        for contest in contests:
            contest.run()
            _gather(document, contest, cases, files)
            _write(output, document)
    document |= {"complete": True, "ended": _now()}
    _write(output, document)
    return document


def _entries(chosen: argparse.Namespace, absent: dict[str, str], bar: Bar) -> tuple[list[Entry], dict[str, Any]]:
    """Who runs on what, and what the files amount to. Engines that read no GGUF run once per model."""
    entries: list[Entry] = []
    files: dict[str, Any] = {}
    for name in chosen.files:
        file = models.FILES.get(name) or models.ModelFile(Path(name).stem, Path(name).stem, "")
        path = models.make_file(name, chosen.folder, bar.making) if name in models.FILES else Path(name)
        sizes = models.sizes(path)
        files[file.name] = models.facts(path, sizes)
        for engine in (ENGINES[one] for one in chosen.engines if one not in absent):
            if name in models.FILES and file.model not in engine.models and not chosen.everywhere:
                continue
            if engine.reads == "gguf":
                entries.append(Entry(engine, file.name, file.model, path, sizes.vocab_size))
            elif name in models.FILES and not any(e.engine == engine and e.model == file.model for e in entries):
                form = file.model if engine.reads == "folder" else engine.reads
                made = (models.make_folder if engine.reads == "folder" else models.make_file)(
                    form, chosen.folder, bar.making
                )
                entries.append(Entry(engine, form, file.model, made, sizes.vocab_size))
    return entries, files


def _header(chosen: argparse.Namespace, absent: dict[str, str], files: dict[str, Any]) -> Document:
    loose = {
        name: ENGINES[name].loose[chosen.cpu]
        for name in chosen.engines
        if chosen.cpu in ENGINES[name].loose and name not in absent
    }
    return {
        "schema": 1,
        "complete": False,
        "quick": chosen.quick,
        "started": _now(),
        "cpu_mode": chosen.cpu,
        "threads": chosen.threads,
        "repeat": chosen.repeat,
        "seed": chosen.seed,
        **limits.commit(ROOT),
        "machine": limits.machine(),
        "load_average": os.getloadavg()[0],
        "notes": chosen.note,
        "absent": absent,
        "not_held_to_cpu_mode": loose,
        "skipped": sorted(map(":".join, chosen.skip)),
        "options": engine_options(chosen),
        "files": files,
        "engines": {},
        "samples": [],
        "host": [],
        "rest": [],
        "failures": [],
    }


def _gather(document: Document, contest: Contest, cases: Sequence[Case], files: dict[str, Any]) -> None:
    document["samples"] += contest.samples
    document["engines"] |= contest.facts
    document["host"] += contest.hosts
    document["rest"] += contest.rests
    document["failures"] += contest.failures
    document["summary"] = summarize(document["samples"], {case.name: case for case in cases}, files, document["limits"])
    document["llama_bench"] = tool_checks(document["samples"])
    document["targets"] = [] if document["quick"] else target_rows(document["summary"])


def _write(path: Path, document: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _free_path(folder: Path, cpu: str) -> Path:
    base = f"cpu-{datetime.date.today().isoformat()}-{cpu}"
    names = [base, *(f"{base}-{number}" for number in range(2, 1000))]
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


if __name__ == "__main__":
    sys.exit(main())
