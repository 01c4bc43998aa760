"""Weights in host memory: the same bits as without, captured and launched kernel by kernel; and how fast they come."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from penstock import LLM
from penstock.ops import OPS
from penstock.passes.offload import OffloadedBlock, WeightStream
from penstock.passes.offload.pinned import map_to_device, pin
from penstock.types import RequestOutput
from tests.gpu.answers import ask, prompts
from tests.gpu.captured import prepare
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE
from tests.llm.tiny import write_config

HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
COMMON: dict[str, Any] = {
    "num_hidden_layers": 7,
    "vocab_size": 1024,
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
}
SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"hidden_size": 1024, "intermediate_size": 4096, **HEADS, **COMMON},
    "Qwen3MoeForCausalLM": {
        **{"hidden_size": 1024, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
        **HEADS,
        **COMMON,
    },
}
STORED: dict[str, dict[str, Any]] = {
    "16-bit": {"deterministic": True},
    "fp8": {"deterministic": True, "quantization": "fp8"},
    "fast": {},
    "fast fp8": {"quantization": "fp8"},
    "fast int4": {"quantization": "int4"},
    "fast int8": {"quantization": "int8"},
}
ALL = 16.0  # GiB
SOME = {"LlamaForCausalLM": 0.05, "Qwen3MoeForCausalLM": 0.4}
MAX_OTHERS = 0.02  # of tokens, in fast mode, whose sums may be split otherwise
GROUPS = [prompts(3), prompts(70), prompts(200, 5, 33, 90, 8), prompts(*range(4, 20))]
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-offload-")


def _need() -> None:
    if DEVICE == "cpu":
        raise Skip("it is about a GPU's memory")


def _engine(architecture: str, **options: Any) -> LLM:
    folder = write_config(Path(_FOLDERS.name) / architecture, architecture, **SIZES[architecture])
    usual: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_tokens": 8192, "threads": 2, "max_num_batched_tokens": 512}
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        progress=False,
        device=DEVICE,
        speculative_config=None,
        **usual | options,
    )


def _told(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    """Tokens and their log probabilities, which show every bit."""
    return [
        (token, ranked[token].logprob)
        for output in outputs
        for token, ranked in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or ())
    ]


def _ask_all(llm: LLM) -> list[tuple[int, float]]:
    """Each group twice, so that steps that are captured when they come again are, too."""
    return [told for given in [*GROUPS, *GROUPS] for told in _told(ask(llm, given, max_tokens=12, logprobs=0))]


@lru_cache(maxsize=2)
def _plain(architecture: str, stored: str, way: str) -> list[tuple[int, float]]:
    with _engine(architecture, enforce_eager=way == "eager", enable_prefix_caching=False, **STORED[stored]) as llm:
        if way == "captured":
            prepare(llm)
        return _ask_all(llm)


def _blocks(llm: LLM) -> list[OffloadedBlock]:
    executor: Any = llm.service.engine.executor
    return [block for block in executor.model.blocks if isinstance(block, OffloadedBlock)]


@check(
    [
        (architecture, stored, amount, way)
        for architecture in SIZES
        for stored in STORED
        for amount, way in (("all", "eager"), ("all", "captured"), ("some", "captured"))
    ]
)
def offloaded_weights_give_the_same_bits(architecture: str, stored: str, amount: str, way: str) -> Figures:
    """Whatever lies in the buffers before a step. Copies take longer here than kernels: one that does not wait for them
    computes with another layer's weights."""
    _need()
    if "fp8" in stored and torch.cuda.get_device_capability() < (8, 9):
        raise Skip("no GPU with 8-bit floats")
    expected = _plain(architecture, stored, way)
    options = STORED[stored] | {"cpu_offload_gb": ALL if amount == "all" else SOME[architecture]}
    with _engine(architecture, enforce_eager=way == "eager", enable_prefix_caching=False, **options) as llm:
        blocks = _blocks(llm)
        least = COMMON["num_hidden_layers"] if amount == "all" else 3
        require(len(blocks) >= least, f"{len(blocks)} layers have weights outside")
        figures = prepare(llm) if way == "captured" else {}
        for buffer in blocks[0].stream.buffers:
            buffer.fill_(255)  # NaN in every float
        found = _ask_all(llm)
    differ = sum(a != b for a, b in zip(found, expected, strict=True))
    most = 0 if "deterministic" in options else MAX_OTHERS * len(found)
    require(differ <= most, f"{differ} of {len(found)} tokens or log probabilities are others")
    return figures


def _seconds(work: Callable[[], object], times: int = 5) -> float:
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


@check([(1,), (4,), (16,)])
def offloaded_experts_are_read_in_place(num_rows: int) -> Figures:
    """The product of a stack in host memory is that of its copy; its speed beside that of copying the stack decides
    FEW_SHARE in penstock/passes/offload."""
    _need()
    num_experts, num_chosen, width, hidden = 128, 8, 2048, 768
    chance = torch.Generator(DEVICE).manual_seed(num_rows)
    stack = torch.randn(num_experts * hidden, width, generator=chance, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(num_rows, width, generator=chance, device=DEVICE, dtype=torch.bfloat16)
    chances = torch.rand(num_rows, num_experts, generator=chance, device=DEVICE)
    ids = chances.topk(num_chosen).indices.to(torch.int32)
    host = pin(stack)
    mapped = map_to_device(host, torch.device("cuda"))
    require(host.is_pinned() and mapped.is_cuda, "the memory is not page-locked, or not the device's")
    require(torch.equal(mapped, stack), "the device reads other values")
    multiply = OPS["grouped_product"].bodies["cuda"].function
    require(torch.equal(multiply(x, mapped, ids, num_experts), multiply(x, stack, ids, num_experts)), "another product")
    read_s = _seconds(lambda: multiply(x, mapped, ids, num_experts))
    copy_s = _seconds(lambda: stack.copy_(host, non_blocking=True))
    num_bytes = 2 * hidden * width * num_rows * num_chosen
    return {
        "in place GB/s": num_bytes / read_s / 1e9,
        "copies GB/s": stack.nbytes / copy_s / 1e9,
        "in place by copied time": read_s / copy_s,
    }


@check([("eager",), ("captured",)])
def offloaded_weights_come_beside_kernels(way: str) -> Figures:
    """Decode steps take no longer than their copies by much: bytes of all offloaded weights by the time of a step."""
    _need()
    with _engine("LlamaForCausalLM", cpu_offload_gb=ALL, enforce_eager=way == "eager") as llm:
        if way == "captured":
            prepare(llm)
        stream: WeightStream = _blocks(llm)[0].stream
        num_bytes = sum(each.num_bytes for each in stream.many.copies)
        given, length = prompts(20), 64
        ask(llm, given, max_tokens=length)
        begun = time.perf_counter()
        ask(llm, given, max_tokens=length)
        step_s = (time.perf_counter() - begun) / length
    return {"MB": num_bytes / 1e6, "ms a step": 1e3 * step_s, "GB/s": num_bytes / step_s / 1e9}


@check()
def offloaded_weights_leave_the_gpu() -> Figures:
    """And the host's pages are given back with the engine."""
    _need()
    held = []
    for amount in (0.0, ALL):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with _engine("LlamaForCausalLM", cpu_offload_gb=amount, enforce_eager=True) as llm:
            held.append(torch.cuda.memory_allocated() - before)
            if amount:
                stream: WeightStream = _blocks(llm)[0].stream
                outside = sum(each.num_bytes for each in stream.many.copies)
                inside = sum(buffer.nbytes for buffer in stream.buffers)
    require(held[0] - held[1] >= 0.95 * (outside - inside), f"{held} bytes, and {outside - inside} should have left")
    return {"MB before": held[0] / 1e6, "MB after": held[1] / 1e6}
