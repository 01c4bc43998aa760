"""Ways to compute prompt attention on a Hopper GPU, beside cuDNN's: `python3 bench/prefill_variants.py`.

Every variant is compiled and checked in a process of its own, with a time limit: one that hangs or fails is named and
left out. Then one process times all that passed. `--only WORDS` keeps the variants whose names contain one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]  # of pip -e

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import attention
from penstock.ops.triton.attention import attention as paged
from penstock.ops.triton.attention import prefill
from penstock.ops.triton.attention.attend import Scoring, cache_args

H, K, D, P = 32, 8, 128, 16
GROUP, SCALE = H // K, D**-0.5
LOG2_E = 1.4426950408889634
NUM_PROGRAMS = 132
CHECK_S, STALL_S, TOTAL_S = 80.0, 15.0, 145.0
MAX_ERROR = 6e-3  # of bfloat16 operands, by norms


# The problems


@dataclass
class Problem:
    """Sequences of `lengths` positions whose last `counts` are computed, in a paged cache and in dense rows."""

    name: str
    lengths: list[int]
    counts: list[int]
    tensors: dict[str, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.lengths == self.counts

    @property
    def flop(self) -> float:
        pairs = sum(c * (n - c) + c * (c + 1) // 2 for n, c in zip(self.lengths, self.counts))
        return 4.0 * D * H * pairs

    def make(self, device: str = "cuda", seed: int = 0) -> Problem:
        torch.manual_seed(seed)
        starts, pages = [0], [-(-n // P) for n in self.lengths]
        for c in self.counts:
            starts.append(starts[-1] + c)
        kv = torch.randn(sum(pages) * P, 2, K, D, device=device, dtype=torch.bfloat16)
        order = torch.randperm(sum(pages) + 7, device=device)
        pool = torch.full((len(order), 2, K, P, D), float("nan"), device=device, dtype=torch.bfloat16)
        pool[order[: sum(pages)]] = kv.view(-1, P, 2, K, D).permute(0, 2, 3, 1, 4)
        table = torch.zeros(len(pages), -(-max(pages) // 4) * 4, dtype=torch.int32, device=device)
        at, rows = 0, []
        for s, (n, num) in enumerate(zip(self.lengths, pages)):
            blocks = order[at : at + num]
            table[s, :num] = blocks.int()
            if n % P:
                pool[blocks[-1], :, :, n % P :] = float("nan")  # never written
            rows.append(kv[at * P : at * P + n])
            at += num
        if self.is_whole:
            dense = torch.cat(rows)
            self.tensors.update(k=dense[:, 0].contiguous(), v=dense[:, 1].contiguous())
        numbers = {"starts": starts, "lengths": self.lengths}
        self.tensors.update({x: torch.tensor(y, dtype=torch.int32, device=device) for x, y in numbers.items()})
        self.tensors.update(
            q=torch.randn(starts[-1], H, D, device=device, dtype=torch.bfloat16),
            k_cache=pool[:, 0].transpose(2, 3),
            v_cache=pool[:, 1],
            table=table,
        )
        return self

    def tiles(self, tokens: int) -> Tensor:
        """Tiles of some queries, what takes longest first, as runner/cuda/packed.py makes them."""
        if tokens not in self.kept:
            some = [(s, first) for s, c in enumerate(self.counts) for first in range(0, c, tokens)]
            some.sort(key=lambda tile: self.counts[tile[0]] - self.lengths[tile[0]] - tile[1])
            self.kept[tokens] = torch.tensor(some, dtype=torch.int32, device=self.tensors["q"].device)
        return self.kept[tokens]


def timed_problems() -> list[Problem]:
    whole = [(64, 128), (64, 512), (32, 1024), (16, 2048), (8, 4096), (8, 16000), (1, 16000)]
    made = [Problem(f"{b}x{n}", [n] * b, [n] * b) for b, n in whole]
    torch.manual_seed(7)
    ragged = (torch.randn(128).mul(0.8).exp() * 160).int().clamp(8, 4000).tolist()
    made.append(Problem("4x2048@16k", [16384] * 4, [2048] * 4))
    made.append(Problem("16x512@4k", [4096] * 16, [512] * 16))
    made.append(Problem("ragged160", ragged, ragged))
    return made


def checked_problems() -> list[Problem]:
    whole = [1, 17, 128, 129, 300, 1000, 77, 4, 640, 2049, 31, 32, 33, 127]
    return [
        Problem("whole", whole, whole),
        Problem("chunks", [1, 200, 500, 1024, 1600, 129, 128], [1, 7, 130, 512, 33, 129, 1]),
    ]


# The variants: each maps a problem to its output, or refuses


def run_today(problem: Problem, rows: int = 128, num: int = 64, tail: int | None = None, **options: Any) -> Tensor:
    t = problem.tensors
    out = torch.empty_like(t["q"])
    tiles = problem.tiles(rows // GROUP)
    paged._prefill[(len(tiles), K)](
        t["q"],
        cache_args(t["k_cache"], t["v_cache"]),
        t["table"],
        t["starts"],
        t["lengths"],
        tiles,
        out,
        Scoring(SCALE, None, 0, None),
        t["q"].stride(0),
        t["table"].stride(0),
        H,
        P,
        GROUP,
        rows,
        D,
        D,
        num,
        "tf32",
        tail,
        **options,
    )
    return out


@triton.jit
def _attend_dense(
    query, top, total, sums, k_desc, v_desc, row, column, start, end, position, factor,
    SIZE: tl.constexpr, NUM: tl.constexpr, MASKED: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, end, NUM, warp_specialize=WS):
        k = k_desc.load([row + begin, column])
        s = tl.dot(query, tl.trans(k))
        if MASKED:
            j = begin + tl.arange(0, NUM)
            s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - now[:, None])
        kept = tl.exp2(top - now)
        v = v_desc.load([row + begin, column])
        sums = tl.dot(p.to(v.dtype), v, sums * kept[:, None])
        total = total * kept + tl.sum(p, 1)
        top = now
    return top, total, sums


@triton.jit(do_not_specialize=["num_tokens"])
def _prefill_dense(
    q, k, v, query_start, lengths, tiles, out, factor, q_row, kv_row, num_tokens, num_heads,
    PACK: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    NUM: tl.constexpr, WS: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """ROWS // PACK queries of a whole prompt, whose keys and values lie in rows, by TMA."""
    tile, group = tl.program_id(0), tl.program_id(1)
    s, from_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - begin
    r, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    token = from_token + r // PACK
    head = group * PACK + r % PACK
    row = (begin + token).to(tl.int64)
    inside = (token < count)[:, None]
    query = tl.load(q + (row * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
    if ON_DEVICE:
        k_desc = tl.make_tensor_descriptor(k, [num_tokens, KV * SIZE], [kv_row, 1], [NUM, SIZE])
        v_desc = tl.make_tensor_descriptor(v, [num_tokens, KV * SIZE], [kv_row, 1], [NUM, SIZE])
    else:
        k_desc, v_desc = k, v
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, SIZE), tl.float32)
    column = group * PACK // GROUP * SIZE
    whole = (from_token + 1) // NUM * NUM
    end = tl.minimum(count, from_token + ROWS // PACK)
    top, total, sums = _attend_dense(
        query, top, total, sums, k_desc, v_desc, begin, column, 0, whole, token, factor, SIZE, NUM, False, WS
    )
    top, total, sums = _attend_dense(
        query, top, total, sums, k_desc, v_desc, begin, column, whole, end, token, factor, SIZE, NUM, True, False
    )
    y = sums / total[:, None]
    tl.store(out + (row * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)


def run_tma(
    problem: Problem,
    rows: int = 128,
    num: int = 128,
    pack: int = GROUP,
    ws: bool = False,
    on_device: bool = False,
    **options: Any,
) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    t = problem.tensors
    k, v, out = t["k"].view(-1, K * D), t["v"].view(-1, K * D), torch.empty_like(t["q"])
    if not on_device:
        k, v = (TensorDescriptor.from_tensor(x, [num, D]) for x in (k, v))
    tiles = problem.tiles(rows // pack)
    _prefill_dense[(len(tiles), H // pack)](
        t["q"], k, v, t["starts"], t["lengths"], tiles, out, SCALE * LOG2_E, t["q"].stride(0), K * D, len(t["k"]), H,
        pack, GROUP, K, rows, D, num, ws, on_device, **options,
    )  # fmt: skip
    return out


def run_hopper(
    problem: Problem, is_paged: bool = False, one_each: bool = False, pack: int = GROUP, **options: Any
) -> Tensor:
    t, tiles = problem.tensors, problem.tiles(128 // pack)
    k, v = ("k_cache", "v_cache") if is_paged else ("k", "v")
    return prefill.attend_tiles(
        t["q"],
        t[k],
        t[v],
        t["table"] if is_paged else None,
        t["starts"],
        t["lengths"],
        t["starts"],
        tiles,
        SCALE,
        1 << 30 if one_each else NUM_PROGRAMS,
        pack,
        **options,
    )


@triton.jit(do_not_specialize=["table_row"])
def _gather(k, v, table, lengths, kv_start, k_out, v_out, k_block, v_block, table_row,
            KV: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Copy a page of all heads' keys and values to dense rows."""
    page, s = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + s)
    if page * P < length:
        block = tl.load(table + s * table_row + page).to(tl.int64)
        h, at = tl.arange(0, KV * P), tl.arange(0, SIZE)  # [K, P] rows
        row = (tl.load(kv_start + s) + page * P + h % P).to(tl.int64)
        inside = (page * P + h % P < length)[:, None]
        to = (row * KV + h // P)[:, None] * SIZE + at[None, :]
        x = tl.load(k + block * k_block + h[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
        y = tl.load(v + block * v_block + h[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
        tl.store(k_out + to, x)
        tl.store(v_out + to, y)


def run_gathered(problem: Problem, **options: Any) -> Tensor:
    """Copy the cache's pages to dense rows first."""
    t = problem.tensors
    if "kv_start" not in problem.kept:
        pages = torch.tensor([0, *(-(-n // P) * P for n in problem.lengths)]).cumsum(0)
        problem.kept["kv_start"] = pages.int().to(t["q"].device)
        problem.kept["kv_rows"] = int(pages[-1])
    kv_start, num_rows = problem.kept["kv_start"], problem.kept["kv_rows"]
    k, v = (torch.empty((num_rows, K, D), dtype=t["q"].dtype, device=t["q"].device) for _ in range(2))
    _gather[(-(-max(problem.lengths) // P), len(problem.lengths))](
        t["k_cache"], t["v_cache"], t["table"], t["lengths"], kv_start, k, v,
        t["k_cache"].stride(0), t["v_cache"].stride(0), t["table"].stride(0), K, P, D, num_warps=4,
    )  # fmt: skip
    return prefill.attend_tiles(
        t["q"], k, v, None, t["starts"], t["lengths"], kv_start, problem.tiles(32), SCALE, NUM_PROGRAMS, **options
    )


def run_flash_varlen(problem: Problem) -> Tensor:
    t, longest = problem.tensors, max(problem.lengths)
    return torch.ops.aten._flash_attention_forward(
        t["q"], t["k"], t["v"], t["starts"], t["starts"], longest, longest, 0.0, True, False, scale=SCALE
    )[0]


def run_cudnn_varlen(problem: Problem, expand: bool = False) -> Tensor:
    t, longest = problem.tensors, max(problem.lengths)
    k, v = t["k"], t["v"]
    if expand:
        k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    return torch.ops.aten._cudnn_attention_forward(
        t["q"], k, v, None, t["starts"], t["starts"], longest, longest, False, 0.0, True, False, scale=SCALE
    )[0]


Run = Callable[[Problem], Tensor]


@dataclass(frozen=True)
class Variant:
    name: str
    run: Run
    needs_whole: bool = False  # prompts whose keys all lie in rows


def variants() -> list[Variant]:
    made = [
        Variant("today", partial(run_today, num_warps=8, num_stages=2, maxnreg=128)),
        Variant("today 128/64 w8 s2", partial(run_today, num_warps=8, num_stages=2)),
        Variant("tail1", partial(run_today, tail=1, num_warps=8, num_stages=2, maxnreg=128)),
    ]
    for rows, num, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
    ):
        run = partial(run_today, rows=rows, num=num, tail=1, num_warps=warps, num_stages=stages)
        made.append(Variant(f"tail1 {rows}/{num} w{warps} s{stages}", run))
    for rows, num, warps, stages, extra in (
        (128, 128, 8, 2, {}),
        (128, 64, 8, 3, {}),
        (64, 64, 4, 2, {}),
        (64, 64, 4, 3, {}),
        (128, 128, 8, 2, {"pack": 1}),
    ):
        name = f"tma {rows}/{num} w{warps} s{stages}" + "".join(
            f" {word}" + (f"{value}" if word == "pack" else "") for word, value in extra.items()
        )
        run = partial(run_tma, rows=rows, num=num, num_warps=warps, num_stages=stages, **extra)
        made.append(Variant(name, run, True))
    for words, options in (
        ("", {}),
        ("turns", {"pingpong": True}),
        ("heads1st", {"heads_first": True}),
        ("turns heads1st", {"pingpong": True, "heads_first": True}),
        ("each", {"one_each": True}),
        ("each turns", {"one_each": True, "pingpong": True}),
        ("each heads1st", {"one_each": True, "heads_first": True}),
        ("64 s4", {"num": 64, "stages": 4}),
        ("64 s4 turns", {"num": 64, "stages": 4, "pingpong": True}),
        ("pack1", {"pack": 1}),
        ("pack1 turns", {"pack": 1, "pingpong": True}),
        ("pack1 each", {"pack": 1, "one_each": True}),
        ("noclear", {"clear": False}),
    ):
        made.append(Variant(f"ws dense {words}".strip(), partial(run_hopper, **options), True))
    for words, options in (
        ("", {}),
        ("turns", {"pingpong": True}),
        ("heads1st", {"heads_first": True}),
        ("turns heads1st", {"pingpong": True, "heads_first": True}),
        ("each", {"one_each": True}),
        ("64 s4", {"num": 64, "stages": 4}),
        ("64 s4 turns", {"num": 64, "stages": 4, "pingpong": True}),
        ("pack1", {"pack": 1}),
    ):
        made.append(Variant(f"ws paged {words}".strip(), partial(run_hopper, is_paged=True, **options)))
    made.append(Variant("ws gathered", run_gathered))
    made.append(Variant("ws gathered turns", partial(run_gathered, pingpong=True)))
    made.append(Variant("lib flash varlen", run_flash_varlen, True))
    made.append(Variant("lib cudnn varlen", run_cudnn_varlen, True))
    made.append(Variant("lib cudnn varlen expanded", partial(run_cudnn_varlen, expand=True), True))
    return made


# Checks


def check(variant: Variant) -> dict[str, Any]:
    """Compare with the reference in float32 on ragged prompts and chunks, and with itself."""
    begun, worst = time.monotonic(), 0.0
    for at, problem in enumerate(checked_problems()):
        if variant.needs_whole and not problem.is_whole:
            continue
        t = problem.make(seed=11 + at).tensors
        wanted = attention.reference(
            t["q"].float(), t["k_cache"], t["v_cache"], t["table"], t["starts"], t["lengths"], SCALE
        )
        outs = []
        for _ in range(3):
            poison = torch.full_like(t["q"], float("nan"))
            del poison  # the next allocation of this size takes its place
            outs.append(variant.run(problem).clone())
        torch.cuda.synchronize()
        for s, begin in enumerate(t["starts"].tolist()[:-1]):
            end = begin + problem.counts[s]
            x, y = outs[0][begin:end].double(), wanted[begin:end].double()
            error = float((x - y).norm() / y.norm())
            if not error < MAX_ERROR:
                share = float((~((x - y).abs() < 0.05)).double().mean())
                return {"error": f"{problem.name}[{s}] length {problem.lengths[s]}: {error:.2g} off, {share:.1%} of it"}
            worst = max(worst, error)
        if not all(torch.equal(outs[0], other) for other in outs[1:]):
            return {"error": f"{problem.name}: other bits in another run"}
    return {"off": worst, "check_s": round(time.monotonic() - begun, 1)}


# Times


def median_ms(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    run()
    events[1].record()
    torch.cuda.synchronize()
    count = max(3, min(30, int(25.0 / max(1e-3, events[0].elapsed_time(events[1])))))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for first, last in pairs:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


def library_runs(problem: Problem) -> dict[str, Callable[[], object]]:
    """SDPA's backends on equal prompts; for chunks, keys before them without a mask and the chunk's own with one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(zip(problem.lengths, problem.counts))) > 1:
        return {}
    b, n, c = len(problem.lengths), problem.lengths[0], problem.counts[0]

    def rows(heads: int, num: int, split: bool) -> Tensor:
        shape = (b, num, heads, D) if split else (b, heads, num, D)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2) if split else x

    def call(backend: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    made: dict[str, Callable[[], object]] = {}
    for name, backend, split in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION, False),
        ("cudnn bshd", SDPBackend.CUDNN_ATTENTION, True),
        ("flash", SDPBackend.FLASH_ATTENTION, True),
    ):
        q = rows(H, c, split)
        own = rows(K, c, split), rows(K, c, split)
        parts = [partial(call, backend, q, *own, True)]
        if n > c:
            parts.append(partial(call, backend, q, rows(K, n - c, split), rows(K, n - c, split), False))
        made[name] = partial(lambda parts: [part() for part in parts], parts)
    return made


def time_all(names: Sequence[str], skip: set[tuple[str, str]], note: Callable[[dict[str, Any]], None]) -> None:
    chosen = [variant for variant in variants() if variant.name in names]
    for problem in timed_problems():
        problem.make()
        runs: dict[str, Callable[[], object]] = dict(library_runs(problem))
        for variant in chosen:
            if problem.is_whole or not variant.needs_whole:
                runs[variant.name] = partial(variant.run, problem)
        for name, run in runs.items():
            if (problem.name, name) in skip:
                continue
            note({"begin": [problem.name, name]})
            try:
                ms = median_ms(run)
                note({"problem": problem.name, "variant": name, "ms": ms, "tflops": problem.flop / ms / 1e9})
            except Exception as error:
                note({"problem": problem.name, "variant": name, "error": repr(error)[:200]})
        problem.tensors.clear()
        problem.kept.clear()
        runs.clear()
        torch.cuda.empty_cache()


def learn_library() -> dict[str, Any]:
    """The host's time per call, and whether a captured call follows other sequence bounds of the same shapes."""
    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    some = [100, 300, 57, 343]
    for variant in variants():
        if variant.name not in (
            "today",
            "ws dense",
            "ws paged",
            "lib flash varlen",
            "lib cudnn varlen",
            "lib cudnn varlen expanded",
        ):
            continue
        try:
            problem = Problem("host", some, some).make()
            for _ in range(3):
                variant.run(problem)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(50):
                variant.run(problem)
            fact: dict[str, Any] = {"host_us": round((time.perf_counter() - begun) * 2e4, 1)}
            torch.cuda.synchronize()
            facts[variant.name] = fact
            if variant.name.startswith("lib"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = variant.run(problem)
                problem.tensors["starts"].copy_(torch.tensor([0, 343, 400, 700, 800], dtype=torch.int32))
                out.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                wanted = variant.run(problem)
                fact["graph_follows"] = bool((out.float() - wanted.float()).norm() / wanted.float().norm() < 1e-3)
        except Exception as error:
            facts[variant.name] = {**facts.get(variant.name, {}), "error": repr(error)[:160]}
    return facts


# Processes


def set_up() -> None:
    torch.cuda.init()
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def fork(work: Callable[[], object], path: Path) -> int:
    """Run `work` in a process of its own; what it prints goes to a file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        output = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        set_up()
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def check_to(variant: Variant, path: Path) -> None:
    try:
        found = check(variant)
    except Exception as error:
        words = [line for line in str(error).splitlines() if line.strip()]
        found = {"error": f"{type(error).__name__}: {' … '.join(words[:1] + words[-1:])[:240]}"}
        traceback.print_exc()
    path.write_text(json.dumps(found))


def check_all(chosen: list[Variant], folder: Path, until: float) -> dict[str, dict[str, Any]]:
    places = max(2, min(14, (os.cpu_count() or 4) - 2))
    waiting, running = list(chosen), {}
    paths = {
        variant.name: folder / f"check-{variant.name.replace(' ', '_').replace('/', '-')}.json" for variant in chosen
    }
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < places:
            variant = waiting.pop(0)
            pid = fork(partial(check_to, variant, paths[variant.name]), paths[variant.name])
            running[pid] = variant.name, time.monotonic()
        for pid, (_, since) in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[pid]
            elif time.monotonic() - since > 45.0:
                end(pid)
                del running[pid]
        time.sleep(0.05)
    for pid in running:
        end(pid)
    found = {}
    for name, path in paths.items():
        found[name] = json.loads(path.read_text()) if path.exists() else {"error": "hung, crashed or out of time"}
    return found


def time_passed(names: list[str], folder: Path, until: float) -> list[dict[str, Any]]:
    """Time in one process; if it stands still, start another without the variant that did."""
    path = folder / "times.jsonl"
    done: list[dict[str, Any]] = []
    path.touch()
    while time.monotonic() < until:
        skip = {(row["problem"], row["variant"]) for row in done}

        def work(names: list[str] = names, skip: set[tuple[str, str]] = skip) -> None:
            with path.open("a") as lines:

                def note(row: dict[str, Any]) -> None:
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()

                time_all(names, skip, note)
                note({"end": True})

        pid, size, since = fork(work, path), -1, time.monotonic()
        ended = False
        while time.monotonic() < until:
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended = True
                break
            if path.stat().st_size != size:
                size, since = path.stat().st_size, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                break
            time.sleep(0.05)
        if not ended:
            end(pid)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        done = [row for row in rows if "variant" in row]
        begun = [row["begin"] for row in rows if "begin" in row]
        if rows and "end" in rows[-1]:
            break
        known = {(row["problem"], row["variant"]) for row in done}
        if begun and tuple(begun[-1]) not in known:
            problem, name = begun[-1]
            row = {"problem": problem, "variant": name, "error": "hung or crashed"}
            done.append(row)
            names = [other for other in names if other != name]
            with path.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        elif not begun:
            break
    return done


def show(checks: dict[str, dict[str, Any]], times: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    problems = [problem.name for problem in timed_problems()]
    by = {(row["problem"], row["variant"]): row for row in times}
    best = {}
    for problem in problems:
        rates = [
            by[problem, name]["tflops"] for name in ("cudnn", "cudnn bshd") if "tflops" in by.get((problem, name), {})
        ]
        best[problem] = max(rates) if rates else by.get((problem, "lib flash varlen"), {}).get("tflops")
    print("failed:")
    for name, found in checks.items():
        if "error" in found:
            print(f"  {name}: {found['error']}")
    for row in times:
        if "error" in row:
            print(f"  {row['problem']} {row['variant']}: {row['error']}")
    print("facts:", json.dumps(facts))
    print("TFLOP/s / ratio to the better cuDNN (ragged: to flash varlen)")
    print(f"{'':26}" + "".join(f"{problem:>13}" for problem in problems))
    names = list(dict.fromkeys(row["variant"] for row in times))
    for name in names:
        cells = []
        for problem in problems:
            rate = by.get((problem, name), {}).get("tflops")
            ratio = f"/{rate / best[problem]:.2f}" if rate and best[problem] else ""
            cells.append(f"{rate:.0f}{ratio}" if rate else "-")
        print(f"{name:26}" + "".join(f"{cell:>13}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words, joined by commas")
    parser.add_argument("--seconds", type=float, default=TOTAL_S)
    chosen_words = parser.parse_args()
    words = [word for word in chosen_words.only.split(",") if word]
    begun = time.monotonic()
    folder = Path(os.environ.get("OUT", "/tmp/prefill_variants"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [variant for variant in variants() if not words or any(word in variant.name for word in words)]
    checks = check_all(chosen, folder, begun + min(CHECK_S, chosen_words.seconds * 0.55))
    print(f"checked after {time.monotonic() - begun:.0f} s", flush=True)
    facts_path = folder / "facts.json"
    pid = fork(lambda: facts_path.write_text(json.dumps(learn_library())), facts_path)
    since = time.monotonic()
    while time.monotonic() - since < 20.0 and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.05)
    else:
        if time.monotonic() - since >= 20.0:
            end(pid)
    facts = json.loads(facts_path.read_text()) if facts_path.exists() else {"error": "none: see facts.log"}
    print(f"facts after {time.monotonic() - begun:.0f} s", flush=True)
    passed = [variant.name for variant in chosen if "error" not in checks[variant.name]]
    times = time_passed(passed, folder, begun + chosen_words.seconds)
    print(f"timed after {time.monotonic() - begun:.0f} s", flush=True)
    (folder / "prefill.json").write_text(json.dumps({"checks": checks, "facts": facts, "times": times}, indent=1))
    show(checks, times, facts)


if __name__ == "__main__":
    main()
