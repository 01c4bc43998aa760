"""A run's results as Markdown. Everything is read from the document; nothing is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import TITLES
from bench.engines import ENGINES
from bench.markdown import busy_notes, table

Row = dict[str, Any]
ENGINE_TITLES = {name: engine.title for name, engine in ENGINES.items()} | {
    "llamacpp-by-hand": "llama.cpp, prefix shared by hand"
}


def markdown(document: Row) -> str:
    rows = document.get("summary", [])
    parts = [_head(document)]
    for model in dict.fromkeys(row["model"] for row in rows):
        parts.append(_speeds(model, [row for row in rows if row["model"] == model]))
    parts += [_ratios(rows), _targets(document), _limits(document, rows), _checks(document), _notes(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Row) -> str:
    machine = document["machine"]
    text = (
        f"# CPU benchmark, {document['started'][:10]}, {document['cpu_mode']}\n\n{machine['cpu']}, "
        f"{machine['cores']} cores, {document['threads']} threads; median of {document['repeat']} rounds; commit "
        f"{(document['commit'] or 'unknown')[:10]}"
        f"{' with changes' if document['changed'] else ''}."
    )
    if document["quick"]:
        text += " **A quick trial of small cases, not a measurement.**"
    return text + ("" if document["complete"] else " **The run did not come to its end.**")


def _cases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _speeds(model: str, rows: Sequence[Row]) -> str:
    cases = _cases(rows)
    found = {(row["engine"], row["file"], row["case"]): row for row in rows}
    lines = []
    for engine, file in dict.fromkeys((row["engine"], row["file"]) for row in rows):
        cells = [_figure(found.get((engine, file, case))) for case in cases]
        lines.append([f"{ENGINE_TITLES.get(engine, engine)}, {file}", *cells])
    return f"## {model}: tokens per second (seconds where it says s)\n\n" + table(
        ["engine", *(TITLES.get(case, case) for case in cases)], lines
    )


def _figure(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['median']:.2f}" if row["unit"] == "s" else f"{row['median']:.1f}"


def _ratios(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["engine"] == "penstock"]
    rivals = list(dict.fromkeys(rival for row in ours for rival in row["ratios"]))
    if not rivals:
        return ""
    cases = _cases(ours)
    lines = []
    for file in dict.fromkeys(row["file"] for row in ours):
        for rival in rivals:
            values = {row["case"]: row["ratios"].get(rival) for row in ours if row["file"] == file}
            if any(values.values()):
                cells = [f"{value:.2f}×" if (value := values.get(case)) else "" for case in cases]
                lines.append([f"{file} / {ENGINE_TITLES.get(rival, rival)}", *cells])
    return "## Penstock's speed as a multiple of each other's\n\n" + table(
        ["file / engine", *(TITLES.get(case, case).removesuffix(", s") for case in cases)], lines
    )


def _targets(document: Row) -> str:
    lines = [
        [
            f"{t['file']}, {TITLES.get(t['case'], t['case']).removesuffix(', s')}, "
            f"{ENGINE_TITLES.get(t['rival'], t['rival'])}",
            f"{t['at_least']:.1f}×",
            f"{t['aim']:.1f}×" if t["aim"] else "",
            f"{t['ratio']:.2f}×",
            "yes" if t["met"] else "**no**",
        ]
        for t in document.get("targets", [])
    ]
    return "## Targets\n\n" + table(["", "at least", "aim", "measured", "met"], lines) if lines else ""


def _limits(document: Row, rows: Sequence[Row]) -> str:
    limits = document["limits"]
    if "absent" in limits:
        return f"## Limits\n\nNot measured: {limits['absent']}."
    reads = ", ".join(f"{speed:.0f} GB/s of {size} MB" for size, speed in limits["read_gb_per_s"].items())
    peaks = ", ".join(
        f"{name.removesuffix('_per_s').replace('_', ' ')} {value:.0f}"
        for name, value in limits.items()
        if name.startswith(("fma", "dot"))
    )
    lines = [
        [
            f"{ENGINE_TITLES[row['engine']]}, {row['file']}, {TITLES.get(row['case'], row['case'])}",
            f"{row.get('gb_per_s', row.get('gop_per_s')):.1f} {'GB/s' if 'gb_per_s' in row else 'GOP/s'}",
            f"{row['limit']:.0f}",
            f"{100 * row['share_of_limit']:.0f} %",
        ]
        for row in rows
        if row.get("share_of_limit") and row["case"] in ("prefill-512", "decode-128")
    ]
    shares = "\n\n" + table(["", "achieved", "limit", "share"], lines) if lines else ""
    hosts = [
        f"{host['file']} {1e6 * host['host_s']:.0f} µs of {1e3 * host['step_s']:.2f} ms ({100 * host['share']:.0f} %)"
        for host in document["host"]
        if "host_s" in host
    ]
    text = f"## Limits of the machine, and how near\n\nReads: {reads}. Peaks (1e9 per second): {peaks}.{shares}"
    return text + (f"\n\nPenstock's host time per decode step: {'; '.join(hosts)}." if hosts else "")


def _checks(document: Row) -> str:
    lines = [
        [
            f"{c['file']}, {TITLES.get(c['case'], c['case'])}",
            f"{c['tool']:.1f}",
            f"{c['driver']:.1f}",
            f"{c['ratio']:.2f}",
            "yes" if c["within_10_percent"] else "**no**",
        ]
        for c in document.get("llama_bench", [])
    ]
    return (
        "## llama.cpp as driven here and by llama-bench\n\n"
        + table(["", "llama-bench", "here", "ratio", "within 10 %"], lines)
        if lines
        else ""
    )


def _notes(document: Row) -> str:
    notes = [*document["notes"]]
    notes += busy_notes((rest["busy_share"] for rest in document["rest"]), "engines")
    notes += [f"{ENGINE_TITLES[name]} was skipped: {why}." for name, why in document["absent"].items()]
    if document["skipped"]:
        notes.append(f"Left out: {', '.join(document['skipped'])}.")
    notes += [
        f"{ENGINE_TITLES[name]} was not held to {document['cpu_mode']}: {why}."
        for name, why in document["not_held_to_cpu_mode"].items()
    ]
    notes += [
        f"{f['engine']} failed on {f['file']}{', ' + f['case'] if f['case'] else ''}: {f['error']}"
        for f in document["failures"]
    ]
    versions = dict.fromkeys(
        f"{ENGINE_TITLES[name.split(' on ')[0]]} {facts.get('version')}"
        + (f" ({facts['held']})" if "held" in facts else "")
        for name, facts in document["engines"].items()
    )
    notes.append("Versions: " + ", ".join(versions) + ".")
    return "## Notes\n\n" + "\n".join(f"* {note}" for note in notes)
