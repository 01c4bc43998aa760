"""Stored lists of kernels, and how those of another day differ from them."""

from __future__ import annotations

import difflib
import gzip
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.passes.launches.models import BLOCK_SCHEMES, CPU_SCHEMES, GPU_SCHEMES, WIDE, tiny_configs
from tests.passes.launches.notes import Flow, Lines, Notes
from tests.passes.launches.steps import record_on_cpu, record_on_gpu, record_wide

Steps = dict[str, tuple[Lines, Flow]]


def cases() -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, Notes]]]]]:
    """Every model with every scheme, as the beginning of its steps' keys, and what notes them."""
    tiny = tiny_configs()
    like_llama = {name: tiny[name] for name in ("LlamaForCausalLM.0", "LlamaForCausalLM.1", "Qwen3ForCausalLM.0")}
    kinds = (
        ("cpu", tiny, CPU_SCHEMES, record_on_cpu),
        ("cpu", like_llama, BLOCK_SCHEMES, record_on_cpu),
        ("gpu", tiny, GPU_SCHEMES, record_on_gpu),
        ("gpu", WIDE, GPU_SCHEMES, record_wide),
    )
    for device, configs, schemes, record in kinds:
        for model, config in configs.items():
            for name, scheme in schemes.items():
                yield f"{device}/{model}/{name}", partial(record, config, scheme)


def record_all(beginnings: tuple[str, ...] = ("",)) -> Steps:
    """Note all steps whose key begins so: key → lines and flow."""
    steps: Steps = {}
    for case, record in cases():
        if f"{case}/".startswith(beginnings) or any(one.startswith(f"{case}/") for one in beginnings):
            for step, notes in record():
                steps[f"{case}/{step}"] = notes.lines, notes.flow
    return {key: noted for key, noted in steps.items() if key.startswith(beginnings)}


def write(steps: Steps, path: Path) -> None:
    """Store each line, each list and each flow once."""
    lines: dict[str, int] = {}
    lists: dict[tuple[int, ...], int] = {}
    flows: dict[str, int] = {}
    keys = {}
    for key, (called, flow) in steps.items():
        listed = tuple(lines.setdefault(line, len(lines)) for line in called)
        keys[key] = lists.setdefault(listed, len(lists)), flows.setdefault(";".join(flow), len(flows))
    stored = {"lines": list(lines), "lists": list(lists), "flows": list(flows), "steps": keys}
    text = json.dumps(stored, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)


def read(path: Path) -> Steps:
    raw = path.read_bytes()
    stored = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    lines = stored["lines"]
    return {
        key: ([lines[line] for line in stored["lists"][listed]], stored["flows"][flow].split(";"))
        for key, (listed, flow) in stored["steps"].items()
    }


RENAMED = {  # Triton kernels that were recorded under another name
    "_choose": "_draw",
    "_common": "_shared_prefix",
    "_encoder": "_encoder_attention",
    "_ended": "_add_splits",
    "_exact": "_exact_attention",
    "_few": "_skinny_gemm",
    "_finished": "_fp8_epilogue",
    "_in_order": "merge_in_order",
    "_inputs": "_decode_inputs",
    "_int_finished": "_int_epilogue",
    "_int_row": "run_int_gemv",
    "_int_rows": "_dequantize_rows",
    "_int_tile": "_int_gemm",
    "_joined": "merge_splits",
    "_made_and_used": "_fused_decode",
    "_parts": "_split_gemm",
    "_pieces": "_reduce_tiles",
    "_product": "_gemm",
    "_rounded": "_quantize_rows",
    "_single": "_decode",
    "_store": "_cache_write",
    "_tile": "_prefill",
    "_told": "_reduce_logprobs",
    "_write": "_qkv_write",
    "aim": "set_mirostat_cut",
    "find_likely": "find_xtc_tokens",
    "keep_near": "apply_top_n_sigma",
    "leave_out": "apply_xtc",
    "measure": "measure_moments",
    "measure_surprise": "measure_entropy",
    "set_heat": "set_dynamic_temperature",
    "settle": "update_samplers",
}
TENSOR = re.compile(r"=(\w+\[[\d,]*\][@+\d,]*)")
OPTION = re.compile(r"(num_warps|num_stages|launch_pdl)=(\S+)")


def kernels_of(key: str, steps: Steps, with_flow: bool = False) -> Lines:
    """The lines to compare. What torch computes on a CPU in steps that are never taped is the runner's, before and
    after the model's kernels, and is left out; in all others it computes nothing. A Triton launch is its kernel, grid,
    options and tensors, whatever its arguments are called."""
    lines, flow = steps[key]
    device, _, _, step = key.split("/")[:4]
    untaped = device == "cpu" and ("large" in step or step.startswith("embed"))
    both = [f"{line}  # {places}" if with_flow else line for line, places in zip(lines, flow)]
    if device == "gpu":
        return [line if line.startswith(("torch ", "refused")) else _launch(line) for line in both]
    return [_without_width(line) if untaped else line for line in both if not (untaped and line.startswith("torch "))]


def _launch(line: str) -> str:
    name, grid = line.split(" ")[:2]
    options = [f"{name}={value}" for name, value in OPTION.findall(line)]
    return " ".join([RENAMED.get(name, name), grid, *sorted(TENSOR.findall(line)), *options])


def _without_width(line: str) -> str:
    """Leave out how many blocks wide a large step's tables are: as wide as they need to be, now."""
    words = line.split(" ")
    return " ".join([*words[:14], *words[16:]] if words[0] == "attention" else words)


def differences(expected: Steps, found: Steps, with_flow: bool = False) -> dict[str, str]:
    """For every key of `found` that differs, how: `-` lines are expected, `+` lines were found."""
    told = {}
    for key in found:
        if key not in expected:
            told[key] = "is not among those expected"
            continue
        a, b = kernels_of(key, expected, with_flow), kernels_of(key, found, with_flow)
        if a != b:
            told[key] = "\n".join(difflib.unified_diff(a, b, "expected", "found", lineterm="", n=1))
    return told
