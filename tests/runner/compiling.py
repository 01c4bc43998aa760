"""Both sides of compiling ahead, each in a process of its own: `python -m tests.runner.compiling WORK FOLDER OPTIONS`.

`ahead` compiles for the model in FOLDER, without a GPU. `engine` answers requests with a GPU's runner whose tensors are
a CPU's and whose kernels are compiled but never run, and prints the kernels that were not in the cache."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from penstock import LLM, SamplingParams
from penstock.api.assemble import _resolve_settings, make_table, outline
from penstock.api.engine.load import META, load_weights
from penstock.cache.group import LAYOUTS, group_layers
from penstock.config import EngineConfig, Resolved
from penstock.models.files import open_checkpoint
from penstock.models.files.quantized.checkpoint import keep_floats
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.ops import OPS
from penstock.ops.triton import launch
from penstock.ops.triton.attention import latent
from penstock.ops.triton.exact import latent as exact_latent
from penstock.runner.compile import ahead as aheads
from penstock.runner.compile import cross
from penstock.runner.compile.ahead import start_compiling
from penstock.runner.compile.meta_shapes import MetaShapes
from penstock.runner.compile.warm import first_steps, later_steps
from penstock.runner.cuda.gpu import DriverInfo, likely_facts
from penstock.runner.cuda.runner import CudaRunner
from penstock.runner.memory import BlockMemory
from tests.llm.tiny import dummy

GPU = DriverInfo((9, 0), 132, 140 << 30)
SIZES: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 1000, "max_num_batched_tokens": 256}
OPTIONS = dict(SIZES)


def described(folder: str) -> tuple[ModelSpec, Resolved]:
    config = json.loads((Path(folder) / "config.json").read_text())
    spec = spec_from_config(config, OPTIONS["max_model_len"])
    options = EngineConfig(load_format="dummy", skip_tokenizer_init=True, device="cuda", **OPTIONS)
    return _resolve_settings(spec, config, options, likely_facts(spec, "bfloat16", GPU), offline=True)


def ahead(folder: str) -> None:
    spec, settings = described(folder)
    cross.compile_driver = lambda: None  # there is no driver to link with
    begun = start_compiling(partial(outline, spec, settings, GPU.num_sms), folder, GPU, num_cores=4)
    assert begun is not None
    begun.wait()
    while not list(Path(os.environ["TRITON_CACHE_DIR"]).glob("penstock-*")) and Path(f"/proc/{begun._pid}").exists():
        time.sleep(0.05)
    assert start_compiling(partial(outline, spec, settings, GPU.num_sms), folder, GPU, num_cores=4) is None


def notes(folder: str) -> None:
    """What is noted with our outlines of torch's functions, and with torch's own; all of it is put in order."""
    spec, settings = described(folder)
    cross.set_target(GPU.capability)

    def noted() -> set[tuple[str, str]]:
        singles = outline(spec, settings, GPU.num_sms)
        return set(cross.record_calls(lambda: [step() for step in (*first_steps(singles), *later_steps(singles))]))

    with MetaShapes():
        ours = noted()
    assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
    assert ours == noted() and len(ours) > 10
    first, later = aheads._list_jobs(partial(outline, spec, settings, GPU.num_sms), GPU)
    assert len(first) + len(later) == 1 + len(ours)  # the driver beside them


def quantized(folder: str) -> None:
    """Print the kernels that are compiled for a quantized folder."""
    spec, settings = described(folder)
    checkpoint = keep_floats(open_checkpoint(Path(folder)))
    first, later = aheads._list_jobs(partial(outline, spec, settings, GPU.num_sms, checkpoint), GPU)
    print(" ".join(sorted({name for name, _ in (*first, *later)})))


def trouble(folder: str) -> None:
    """A coordinator that fails, and one that says nothing: neither keeps the engine from starting, and both end."""

    def fail() -> Any:
        raise RuntimeError("planted")

    aheads.TIMEOUT_S = 1.0
    silent: Any = partial(time.sleep, 600)
    for outlined in (fail, silent):
        begin_s = time.monotonic()
        begun = start_compiling(outlined, folder, GPU, num_cores=4)
        assert begun is not None
        begun.wait()
        deadline = begin_s + 60
        while Path(f"/proc/{begun._pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not list(Path(os.environ["TRITON_CACHE_DIR"]).glob("penstock-*"))


class Memory(BlockMemory):
    """On a CPU, laid out as on a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_by_position = True


class Moment:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Moment) -> float:
        return 2.0


def materialized(thing: Any) -> Any:
    """Tensors on the meta device replaced by zeros, in everything that this one holds."""
    if isinstance(thing, torch.Tensor):
        return torch.zeros_like(thing, device="cpu") if thing.is_meta else thing
    if isinstance(thing, (list, tuple)):
        return type(thing)(materialized(part) for part in thing)
    if type(thing).__module__.startswith(
        (
            "penstock.layers",
            "penstock.quant",
            "penstock.models.decoder",
            "penstock.passes",
            "penstock.ops.matmul.lora_stacks",
        )
    ):
        for name, value in list(vars(thing).items()):
            object.__setattr__(thing, name, materialized(value))  # stages are frozen
    return thing


def stand_in() -> list[str]:
    """Make this process one whose GPU computes zeros; the list fills with the kernels that are compiled."""
    cross.set_target(GPU.capability)
    jit: Any = JITFunction
    run, missed = jit.run, []
    jit.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            missed.append(src.name)

    knobs.compilation.listener = listen
    launches: Any = launch
    launches.has_pdl = launches.is_hopper = lambda device: True
    modules: list[Any] = [latent, exact_latent]
    for module in modules:
        module.is_hopper = launches.is_hopper
    cuda_runner: Any = sys.modules[CudaRunner.__module__]
    cuda_runner.cache_launches = lambda: None  # it asks torch for a device
    for bodies in [bodies for op in OPS.values() for bodies in (op.bodies, op.exact_bodies)]:
        bodies.pop("cpu", None)
        if "cuda" in bodies:
            bodies["cpu"] = bodies["cuda"]
    library: Any = torch
    library.empty = lambda *sizes, pin_memory=False, **options: torch.zeros(*sizes, **options)
    library.mm = lambda a, b, out=None: a.new_zeros(a.shape[0], b.shape[1]) if out is None else out
    library.addmm = lambda r, a, b, out=None: a.new_zeros(a.shape[0], b.shape[1]) if out is None else out
    library._scaled_mm = lambda a, b, out_dtype, **_: torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    library.Tensor.pin_memory = lambda self: self
    library.cuda.Event = Moment
    library.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=GPU.num_sms)
    return missed


def engine(folder: str) -> None:
    spec, settings = described(folder)
    skipped = OPTIONS.get("kv_cache_dtype_skip_layers")
    groups = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": skipped} if skipped else {}
    llm: LLM = dummy(folder, kv_cache_tokens=32768, **{name: OPTIONS[name] for name in SIZES}, **groups)
    model: Any = load_weights(None, spec, settings, META, loras=make_table(spec, settings, META))
    missed = stand_in()
    materialized(model)
    grouping = group_layers(spec.states(LAYOUTS[settings.kv_cache_dtype]), settings.block_size)
    memory = Memory(3000, settings.block_size, grouping, settings.kv_cache_dtype)
    runner = CudaRunner(
        model,
        memory,
        None,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        eager=True,
        deterministic=settings.deterministic,
    )
    llm.service.engine.executor, llm.service.engine.overlap = runner, 1
    runner.warm()
    for count, length in ((1, 128), (1, 300), (2, 20), (3, 290), (9, 40), (20, 7), (40, 5), (64, 9)):
        prompts = [[(7 * i + j) % 90 + 3 for j in range(length)] for i in range(count)]
        params = SamplingParams(temperature=0 if count % 2 else 1, max_tokens=4, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    prefix = list(range(3, 63)) * 5
    llm.generate([[*prefix, i] for i in range(8)], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    row_params = SamplingParams(
        max_tokens=4, ignore_eos=True, temperature=1, top_p=0.9, logprobs=3, repetition_penalty=1.1
    )
    for count in (1, 5):
        llm.generate([[i, 9, 8] for i in range(count)], row_params, use_tqdm=False)
    print(" ".join(sorted(missed)))


if __name__ == "__main__":
    work, where, more = sys.argv[1:]
    OPTIONS |= json.loads(more)
    {"ahead": ahead, "engine": engine, "notes": notes, "quantized": quantized, "trouble": trouble}[work](where)
