"""Figures as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.markdown import table
from bench.quiet import BUSY

Row = dict[str, Any]
LATENCIES = (
    ("ttft_s", "TTFT, s", 1),
    ("tpot_s", "TPOT, ms", 1000),
    ("itl_s", "ITL, ms", 1000),
    ("e2e_s", "E2E, s", 1),
    ("refusal_s", "refusal, ms", 1000),
)
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def markdown(document: Row) -> str:
    machine = document["machine"]
    head = (
        f"# Serving, {document['started'][:10]}: {document['workload']['name']}\n\n{document['model']} at "
        f"{document['url']} (version {document['server_version'] or 'unknown'}); {machine['cpu']}, "
        f"{machine['cores']} cores; commit {(document['commit'] or 'unknown')[:10]}"
        f"{' with changes' if document['changed'] else ''}."
    )
    parts = [head, counts(document["phases"])]
    parts += [f"## {row['phase']}\n\n{latencies(row['figures'])}" for row in document["phases"]]
    parts.append("\n".join(f"* {note}" for note in document["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def counts(phases: Sequence[Row]) -> str:
    lines = []
    for row in phases:
        figures = row["figures"]
        pace = f"{row['rate']:.2f}/s {row['arrival']}" if row["rate"] else f"{row['concurrency']} at once"
        lines.append(
            [
                f"{row['phase']}, {pace}",
                *(
                    str(figures[name])
                    for name in (
                        "num_requests",
                        "num_ok",
                        "num_wrong_length",
                        "num_refused",
                        "num_disconnected",
                        "num_failed",
                    )
                ),
                f"{figures['output_tokens_per_s']:.1f}",
                f"{figures['requests_per_s']:.2f}",
                f"{figures['goodput']['requests_per_s']:.2f}",
                f"{100 * figures['goodput']['share']:.0f} %",
            ]
        )
    return table(
        [
            "phase",
            "requests",
            "ok",
            "wrong length",
            "refused",
            "disconnected",
            "failed",
            "tokens/s",
            "requests/s",
            "goodput/s",
            "good",
        ],
        lines,
    )


def latencies(figures: Row) -> str:
    lines = [
        [title, *(f"{spread[column] * scale:.{1 if scale > 1 else 3}f}" for column in COLUMNS)]
        for name, title, scale in LATENCIES
        if (spread := figures[name])
    ]
    return table(["", *COLUMNS], lines) if lines else "No answer had the length that was asked for."


def notes(phases: Sequence[Row], busy_share: float | None) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    if busy_share is not None and busy_share > BUSY:
        found.append(
            f"**The machine was busy before the first request ({100 * busy_share:.0f} % of its cores): these "
            "figures are not to be trusted.**"
        )
    for row in phases:
        figures, samples = row["figures"], row["samples"]
        if figures["num_wrong_length"]:
            error = next(sample["error"] for sample in samples if sample["outcome"] == "wrong length")
            found.append(
                f"**{row['phase']}: {figures['num_wrong_length']} answers have another length than asked for "
                f"({error}) and are in no figure: the server has to honour ignore_eos and max_tokens and to "
                "send usage.**"
            )
        if figures["errors"]:
            counted = ", ".join(f"{name}: {count}" for name, count in figures["errors"].items())
            found.append(f"{row['phase']}: not ok by status: {counted}.")
        if retry := figures["retry_after_s"]:
            found.append(
                f"{row['phase']}: Retry-After on {retry['count']} of {figures['num_refused']} refusals, "
                f"{retry['mean']:.1f} s on average."
            )
        if prompt := figures["prompt_tokens"]:
            cached = figures["cached_tokens"]
            found.append(
                f"{row['phase']}: prompts of {prompt['mean']:.0f} tokens on average"
                + (f", {cached['mean']:.0f} of them cached" if cached else "")
                + f"; the client took {1e6 * figures['client_cpu_per_token_s']:.0f} µs per token."
            )
    if len(phases) > 1 and (before := phases[0]["figures"]["goodput"]["requests_per_s"]):
        after = phases[-1]["figures"]["goodput"]["requests_per_s"]
        found.append(f"Goodput under overload: {after / before:.2f} of that at capacity.")
    return found
