"""From samples to medians, ratios and shares of the machine's limits. Plain functions over plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.cases import Case, speedup
from bench.limits import operation_limit, read_limit

Row = dict[str, Any]
TOOL = "llama-bench"
TOLERANCE = 0.10  # of the driver against llama.cpp's own tool


def summarize(
    samples: Sequence[Row], cases: Mapping[str, Case], files: Mapping[str, Row], limits: Mapping[str, Any]
) -> list[Row]:
    """One row per file, case and engine, in the order they were first run."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for sample in samples:
        if sample["engine"] != TOOL:
            groups.setdefault((sample["file"], sample["case"], sample["engine"]), []).append(sample)
    rows = [_row(group, cases[name]) for (_, name, _), group in groups.items()]
    for row in rows:
        case = cases[row["case"]]
        row["ratio_to_llamacpp"] = _ratio(row, rows, case, "llamacpp")
        if row["engine"] == "penstock":
            rivals = dict.fromkeys(
                other["engine"]
                for other in rows
                if other["case"] == row["case"] and other["model"] == row["model"] and other["engine"] != "penstock"
            )
            row["ratios"] = {rival: _ratio(row, rows, case, rival) for rival in rivals}
        if row["file"] in files:
            row |= achieved(case, row["median"], files[row["file"]], limits)
    return rows


def _row(group: Sequence[Row], case: Case) -> Row:
    values = [sample["value"] for sample in group]
    first = group[0]
    return {
        "file": first["file"],
        "model": first["model"],
        "case": case.name,
        "engine": first["engine"],
        "unit": case.unit,
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "num_samples": len(values),
    }


def _ratio(row: Row, rows: Iterable[Row], case: Case, rival: str) -> float | None:
    """How many times faster a row is than a rival on the same file, or on the same model where it has its own form."""
    others = [
        other
        for other in rows
        if other["engine"] == rival and other["case"] == case.name and other["model"] == row["model"]
    ]
    same = [other for other in others if other["file"] == row["file"]] or [
        other for other in others if rival != "llamacpp" and rival != "llamacpp-by-hand"
    ]
    return speedup(case, row["median"], same[0]["median"]) if same else None


def achieved(case: Case, median: float, file: Row, limits: Mapping[str, Any]) -> Row:
    """GB/s of weights read while decoding, GOP/s of products while prefilling, each beside its limit."""
    if case.measure == "decode":
        speed = median / case.num_seqs * file["decode_bytes"] / 1e9
        return _share("gb_per_s", speed, read_limit(limits, file["decode_bytes"]))
    if case.measure == "prefill":
        kind = "fma" if file["quantization"] in ("F16", "F32", "BF16") else "dot"
        return _share("gop_per_s", 2 * file["prefill_parameters"] * median / 1e9, operation_limit(limits, kind))
    return {}


def _share(name: str, value: float, limit: float | None) -> Row:
    return {name: value, "limit": limit, "share_of_limit": value / limit if limit else None}


def tool_checks(samples: Sequence[Row]) -> list[Row]:
    """llama.cpp as driven here against llama-bench, in the same rounds."""
    checks = []
    for file, case in dict.fromkeys((s["file"], s["case"]) for s in samples if s["engine"] == TOOL):
        tool, driver = (
            [s["value"] for s in samples if (s["file"], s["case"], s["engine"]) == (file, case, engine)]
            for engine in (TOOL, "llamacpp")
        )
        if driver:
            ratio = statistics.median(driver) / statistics.median(tool)
            checks.append(
                {
                    "file": file,
                    "case": case,
                    "tool": statistics.median(tool),
                    "driver": statistics.median(driver),
                    "ratio": ratio,
                    "within_10_percent": abs(ratio - 1) <= TOLERANCE,
                }
            )
    return checks


# (file, case, rival): at least so many times as fast, and what is aimed for
TARGETS = {
    ("smollm2-q4_1", "decode-128", "llamacpp"): (1.6, 2.0),
    ("smollm2-q8_0", "decode-128", "llamacpp"): (1.3, 1.6),
    ("llama-1b-q4_0", "decode-128", "llamacpp"): (1.2, None),
    ("llama-1b-q8_0", "decode-128", "llamacpp"): (1.1, None),
    ("gemma3-270m-q4_k_m", "decode-128", "llamacpp"): (1.2, 1.6),
    ("smollm2-q4_1", "decode-128-at-1024", "llamacpp"): (2.0, 3.0),
    ("smollm2-q4_1", "prefill-512", "llamacpp"): (3.0, None),
    ("smollm2-q8_0", "prefill-512", "llamacpp"): (1.5, None),
    ("smollm2-f16", "prefill-512", "llamacpp"): (1.1, None),
    ("gemma3-270m-q4_k_m", "prefill-512", "llamacpp"): (1.5, 2.5),
    ("smollm2-q4_1", "batch-16", "llamacpp"): (4.0, 6.0),
    ("llama-1b-q4_0", "batch-16", "llamacpp"): (1.7, 2.3),
    ("smollm2-q4_1", "shared-16", "llamacpp"): (8.0, 20.0),
    ("smollm2-q4_1", "shared-16", "llamacpp-by-hand"): (3.0, 5.0),
    ("smollm2-q4_1", "shared-16", "vllm"): (3.0, 5.0),
}


def target_rows(rows: Sequence[Row]) -> list[Row]:
    """Each target with the ratio that was measured, where it was."""
    found = []
    for (file, case, rival), (least, aim) in TARGETS.items():
        ratio = next(
            (
                row["ratios"].get(rival)
                for row in rows
                if row["engine"] == "penstock" and (row["file"], row["case"]) == (file, case)
            ),
            None,
        )
        if ratio is not None:
            found.append(
                {
                    "file": file,
                    "case": case,
                    "rival": rival,
                    "at_least": least,
                    "aim": aim,
                    "ratio": ratio,
                    "met": ratio >= least,
                }
            )
    return found
