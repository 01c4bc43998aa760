"""Which kernels steps call, in order, as text that can be stored and compared.

On a CPU a runner takes the steps, and every kernel that it calls is noted. For a GPU the same steps are taken on the
meta device: what would be launched is noted, and nothing is compiled. Run `python launches.py --help`.

Triton must not have been told to interpret: run it in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import penstock.models.families  # noqa: F401  registers them
import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock import ops
from penstock.cache.group import LAYOUTS, group_layers
from penstock.engine.plan import Admission, Output, Plan, Row
from penstock.errors import InvalidConfig
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops.cpu.runtime import library
from penstock.ops.triton.tuning import ATTENTION_TILE_ROWS
from penstock.passes.load import load_lowered
from penstock.quant.ints import quantize
from penstock.runner.compile import cross
from penstock.runner.cpu.runner import Runner
from penstock.runner.cuda.decode_graphs import make_decode_graphs
from penstock.runner.cuda.gpu import CHECKED
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step, ends_of
from penstock.sampling.row import Chooser
from penstock.types import Request, SamplingParams

CPU, META = torch.device("cpu"), torch.device("meta")
CAPABILITY, NUM_PROCESSORS = (9, 0), 132  # of an H200
BLOCK_SIZE, MAX_NUM_SEQS = 16, 256


@dataclass(frozen=True)
class Scheme:
    """How a model is held and computed."""

    dtype: str
    quantization: str | None = None
    rounded: bool = True  # CPU: packed weights meet activations rounded to 8 bits
    kv: str = "float16"
    exact: bool = False  # GPU: deterministic
    parts: bool = False  # CPU: packed as a file has it, some matrices that are computed together of unlike types


def load(spec: Any, scheme: Scheme, device: torch.device) -> Any:
    """Make the model with weights from a seed, or on the meta device with none."""
    dtype = None if scheme.parts else getattr(torch, scheme.dtype)
    held: dict[str, Any] = {"dtype": dtype, "quantization": scheme.quantization, "rounded": scheme.rounded}
    checkpoint: Any = Blocks(spec) if scheme.parts else None
    return load_lowered(
        checkpoint, spec, dummy_seed=None if scheme.parts else 0, device=device, exact=scheme.exact, **held
    )


class Blocks:
    """A checkpoint of quantized blocks, 8 bits for most matrices, 4 for values and what gates are multiplied with."""

    path = Path("blocks")

    def __init__(self, spec: Any) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        merges = spec.merges()
        for parameter, shape in spec.parameters().items():
            module, _, suffix = parameter.rpartition(".")
            names = {parameter: shape}
            if module in merges:
                above = module.rpartition(".")[0]
                names = {f"{above}.{part}.{suffix}": (rows, *shape[1:]) for part, rows in merges[module].parts}
            self._shapes |= {spec.names.spelling(name): shape for name, shape in names.items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "float32"

    def tensor(self, name: str) -> Tensor:
        return torch.full(self._shapes[name], 0.02)

    def read_codes(self, name: str) -> None:
        return None

    def read_ggml(self, name: str) -> Any:
        if len(self._shapes[name]) != 2:
            return None
        return quantize(self.tensor(name), "int4" if re.search(r"\b(v|up)_proj", name) else "int8")


def make_memory(spec: Any, scheme: Scheme, num_blocks: int, device: torch.device) -> Any:
    """Make the cache of these many blocks, all zero: what was there before must not decide who chooses a token."""
    grouping = group_layers(spec.states(LAYOUTS[scheme.kv]), BLOCK_SIZE)
    memory = BlockMemory(num_blocks, BLOCK_SIZE, grouping, scheme.kv, device)
    memory.blocks.zero_()
    return memory


@contextmanager
def hear_kernels(recorder: Any) -> Iterator[None]:
    """Tell the recorder of every CPU kernel that this thread calls: `recorder.note_call(kernel, args)`."""
    library.thread.recorder = recorder
    try:
        yield
    finally:
        library.thread.recorder = None


def make_graphs(model: Any, memory: Any, scheme: Scheme) -> Any:
    """Make a GPU's decode steps."""
    with torch.inference_mode():
        return make_decode_graphs(model, memory, MAX_NUM_SEQS, NUM_PROCESSORS, True, scheme.exact)


def run_model(model: Any, step: Any, caches: Any, ends: Any = None, at: Tensor | None = None) -> Tensor:
    """Compute the logits of a GPU's step as its runner does, of the tokens that `ends` names or of those at `at`. Where
    there are none, hidden states alone."""
    step.ends = ends
    hidden = model.forward(step, caches)
    if not len(hidden):
        return hidden
    return model.logits(hidden if at is None else hidden[at])


def run_encoder(model: Any, step: Any) -> Tensor:
    """Compute the embeddings of a GPU's step."""
    return model.pool(model.forward(step), step.query_start)


# ---- From here on nothing of the engine is named but what is imported above.

Lines = list[str]
Flow = list[str]
TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
SILENT = re.compile(r"aten\.(empty|new_empty|detach|alias|lift_fresh|_unsafe_view|resolve_)")  # launch nothing


@dataclass
class Notes:
    """Calls as they are made. `flow` has, call by call, which memory each pointer is of, by order of appearance."""

    lines: Lines = field(default_factory=list)
    flow: Flow = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)

    def add(self, line: str, places: Sequence[int], held: Any = None) -> None:
        """Note a call; `held` is kept, so that its memory is nobody else's."""
        self._held.append(held)
        self.lines.append(line)
        known = self._places
        self.flow.append(" ".join("-" if not one else str(known.setdefault(one, len(known))) for one in places))

    def hold(self, value: Any) -> None:
        self._held.append(value)

    def note_call(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Note a CPU kernel: p for a pointer, - for a null pointer, numbers as they are."""
        words, places = [kernel.name], []
        for kind, arg in zip(kernel.argtypes, args):
            if kind is ctypes.c_void_p:
                words.append("p" if arg else "-")
                places.append(arg or 0)
            elif kind is ctypes.c_float:
                words.append(f"{arg:.6g}")
            else:
                words.append(str(int(arg)))
        self.add(" ".join(words), places)

    def launched(self, kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        """Note a Triton kernel: its grid, its arguments by name, its options."""
        named = {**dict(zip(kernel.arg_names, args)), **{k: v for k, v in options.items() if k in kernel.arg_names}}
        more = {name: value for name, value in sorted(options.items()) if name not in kernel.arg_names}
        words = [kernel.fn.__name__, "grid=" + "x".join(map(str, grid))]
        named = dict(flatten(named))
        words += [f"{name}={show(value)}" for name, value in (*named.items(), *more.items())]
        self.add(" ".join(words), [place(value) for value in named.values() if isinstance(value, Tensor)], args)

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a function of torch's that computes or copies."""
        words = [f"torch {func}", *map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())]
        tensors = [*tensors_of(args), *tensors_of(kwargs), *tensors_of(result)]
        self.add(" ".join([*words, "->", show(result)]), [place(one) for one in tensors])


def flatten(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield arguments, those that are grouped in a tuple one by one."""
    for name, value in named.items():
        if isinstance(value, tuple):
            yield from flatten({f"{name}.{index}": part for index, part in enumerate(value)})
        else:
            yield name, value


def place(x: Tensor) -> int:
    """Say which memory a tensor lies in: of the meta device too."""
    return x.untyped_storage()._cdata if x.is_meta else x.data_ptr()


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [found for part in value for found in tensors_of(part)]


def show(value: Any) -> str:
    """Write an argument down: a tensor as type[shape], with strides and offset where they are not the usual ones."""
    if isinstance(value, Tensor):
        text = f"{TYPES.get(value.dtype, value.dtype)}[{','.join(map(str, value.shape))}]"
        if not value.is_contiguous():
            text += f"@{','.join(map(str, value.stride()))}"
        return text + (f"+{value.storage_offset()}" if value.storage_offset() else "")
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, torch.dtype):
        return TYPES.get(value, str(value))
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(show, value))})"
    if hasattr(value, "block_shape"):  # a TMA descriptor: what it describes, and what it copies at a time
        shape, block = (",".join(map(str, sizes)) for sizes in (value.shape, value.block_shape))
        return f"{TYPES[value.base.dtype]}[{shape}]/{block}"
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


class Listening(TorchDispatchMode):
    """Inside the block, what torch computes is noted, and every new tensor keeps its memory."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to skip torch's compiler torch would import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._notes.hold(result)
        if not func.is_view and not SILENT.match(str(func)):
            self._notes.computed(func, args, kwargs, result)
        return result


@contextmanager
def hear_launches(notes: Notes) -> Iterator[None]:
    """Note Triton's launches instead of making them."""
    run = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        notes.launched(kernel, args, grid, options)

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def note_on_cpu(work: Callable[[], object]) -> Notes:
    notes = Notes()
    with Listening(notes), hear_kernels(notes):
        work()
    return notes


def note_on_gpu(work: Callable[[], object]) -> Notes:
    notes = Notes()
    with torch.inference_mode(), Listening(notes), hear_launches(notes):
        work()
    return notes


# ---- Steps, each given by its sequences: positions computed before, tokens in this step, whether logits are wanted.

Part = tuple[int, int, bool]


def decoding(count: int, length: int = 17) -> list[Part]:
    return [(length + 3 * (s % 4), 1, True) for s in range(count)]


STEPS: dict[str, list[Part]] = {
    "decode1": decoding(1),
    "decode3": decoding(3),
    "prompt20": [(0, 20, True)],
    "mixed": [*decoding(2), (8, 9, True)],
}
CPU_STEPS = {  # large ones have more tokens than are taped; told ones are asked for log probabilities of the prompt
    "unfinished": [(0, 20, False)],
    "told20": [(0, 20, True)],
    "large": [*decoding(1), (0, 40, True), (0, 40, False)],
    "large+unfinished": [(0, 40, False), (0, 40, False)],
    "told+large": [*decoding(1), (0, 40, True), (0, 40, False)],
}
PASSAGES = {"embed1": [(0, 1, True)], "embed20": [(0, 20, True)], "embed3": [(0, 1, True), (0, 20, True), (0, 9, True)]}
DECODED = (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256)
PROMPTED = (2, 8, 17, 32, 33, 64, 65, 128, 129, 256, 257, 600, 5000)


def plan_of(number: int, sequences: list[Part], num_groups: int, vocab_size: int, pool: bool, told: bool) -> Plan:
    """Make the plan of a step whose rows are all new, each with blocks of its own."""
    rows, admissions, block = [], [], 0
    for s, (start, count, wanted) in enumerate(sequences):
        number_of_row = 1000 * number + s
        tokens = tuple((7 * s + 3 * i) % (vocab_size - 3) + 3 for i in range(start + count))
        blocks = []
        for _ in range(num_groups):
            used = -(-len(tokens) // BLOCK_SIZE)
            blocks.append({i: block + i for i in range(used)})
            block += used
        request = Request(id=str(number_of_row), tokens=tokens, sampling=SamplingParams(temperature=0), pool=pool)
        admissions.append(Admission(number_of_row, request, 0, tokens))
        output = Output.POOL if pool else Output.SAMPLE if wanted else Output.NONE
        rows.append(Row(number_of_row, start, count, output, tuple(blocks), prompt_logprobs=told and count > 1))
    return Plan(number, tuple(rows), tuple(admissions))


def record_on_cpu(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a model on a CPU. Runners themselves take them, a new one each, as they would record them: the
    second step of a shape has a witness of its own."""
    spec = spec_from_config(config)
    model = load(spec, scheme, CPU)
    memory = make_memory(spec, scheme, 64, CPU)
    steps = PASSAGES if spec.is_encoder else STEPS | CPU_STEPS
    for number, (name, sequences) in enumerate(steps.items()):
        told = name.startswith("told")
        plan = plan_of(number, sequences, len(memory.grouping.groups), spec.vocab_size, spec.is_encoder, told)
        runner, results = Runner(model, memory), list[Any]()

        def run(runner: Runner = runner, plan: Plan = plan, results: list[Any] = results) -> None:
            results.append(runner.run(plan))

        notes = note_on_cpu(run)
        assert results[0].error is None and notes.lines, results[0].error
        yield name, notes


class Gpu:
    """Steps of a model that a GPU would take."""

    def __init__(self, config: dict[str, Any], scheme: Scheme, max_model_len: int | None = None) -> None:
        cross.set_target(CAPABILITY)
        self.spec, self.scheme = spec_from_config(config, max_model_len), scheme
        self.model = load(self.spec, scheme, META)
        if not self.spec.is_encoder:
            memory = make_memory(self.spec, scheme, 1, META)
            self.num_groups = len(memory.grouping.groups)
            self.graphs = make_graphs(self.model, memory, scheme)
        self._chooser = Chooser.DEVICE_FILTERED if scheme.exact else Chooser.DEVICE

    def note(self, work: Callable[[], object]) -> Notes:
        """Note what the work launches, or that it is refused. The first time it may make what is kept ever after."""
        try:
            note_on_gpu(work)
            return note_on_gpu(work)
        except InvalidConfig as error:
            return Notes([f"refused: {str(error).split(':')[0]}"], [""])

    def decode(self, count: int, shared: bool = False, longest: int = 1) -> Iterator[tuple[str, Notes]]:
        """Note a step of single tokens as it is recorded in a graph, and the choice from its logits."""
        graphs, made = self.graphs, []
        with torch.inference_mode():
            one = graphs[(count, shared, graphs.num_kv_splits(count, longest))]
        notes = self.note(lambda: made.append(graphs.pool.run(one.forward)))
        yield "", notes
        if made:
            yield "/choice", self.note(lambda: graphs.pool.run(one.sample[self._chooser]))

    def mixed(self, sequences: list[Part], with_ends: bool = True) -> Iterator[tuple[str, Notes]]:
        """Note a step of any rows, single tokens first; without ends as where log probabilities of a prompt are asked
        for."""
        graphs, count = self.graphs, sum(count for _, count, _ in sequences)
        longest = max(start + count for start, count, _ in sequences)
        num_single = sum(count == 1 for _, count, _ in sequences)
        num_at = sum(wanted for _, _, wanted in sequences)
        tiles = sum(-(-count // graphs.tile_tokens) for _, count, _ in sequences[num_single:])
        with torch.inference_mode():
            at, owners = numbers(num_at), numbers(num_at)
            work = ops.Work(num_single, numbers(tiles, 2, dtype=torch.int32), graphs.num_kv_splits(num_single, longest))
            step = Step(
                numbers(count),
                numbers(count),
                [numbers(count) for _ in range(self.num_groups)],
                [numbers(len(sequences), -(-longest // BLOCK_SIZE), dtype=torch.int32) for _ in range(self.num_groups)],
                numbers(len(sequences) + 1, dtype=torch.int32),
                numbers(len(sequences), dtype=torch.int32),
                work,
            )
            ends = ends_of(step, at, owners, graphs.num_kv_splits(num_at, longest))
        made: list[Tensor] = []
        given = (ends, None) if with_ends else (None, at)
        yield "", self.note(lambda: made.append(run_model(self.model, step, graphs.caches, *given)))
        if made and num_at:
            lengths, rows = numbers(num_at, dtype=torch.int32), numbers(num_at, dtype=torch.int32)
            yield "/choice", self.note(lambda: graphs.sample(made[0], lengths, rows, self._chooser))

    def embed(self, sequences: list[Part]) -> Iterator[tuple[str, Notes]]:
        """Note a step of whole sequences, and how they are pooled."""
        count, tiles = (
            sum(count for _, count, _ in sequences),
            sum(-(-count // ATTENTION_TILE_ROWS) for _, count, _ in sequences),
        )
        starts, lengths = (numbers(len(sequences) + more, dtype=torch.int32) for more in (1, 0))
        work = ops.Work(0, numbers(tiles, 2, dtype=torch.int32))
        step = Step(numbers(count), numbers(count), [], [], starts, lengths, work)
        yield "", self.note(lambda: run_encoder(self.model, step))


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make numbers that only their shape is known of."""
    return torch.empty(shape, dtype=dtype, device=META)


def record_on_gpu(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a tiny model on a GPU."""
    gpu = Gpu(config, scheme)
    steps: dict[str, Iterator[tuple[str, Notes]]] = {}
    if gpu.spec.is_encoder:
        steps = {name: gpu.embed(sequences) for name, sequences in PASSAGES.items()}
    else:
        for name, sequences in STEPS.items():
            single = name.startswith("decode")
            steps[name] = gpu.decode(len(sequences)) if single else gpu.mixed(sequences)
        steps["told20"] = gpu.mixed(STEPS["prompt20"], with_ends=False)
        steps |= {
            "unfinished": gpu.mixed([(0, 20, False)]),
            "mixed+unfinished": gpu.mixed([*decoding(2), (0, 9, False)]),
        }
    for name, noted in steps.items():
        yield from ((name + what, notes) for what, notes in noted)


def record_wide(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a large model on a GPU, of many numbers of rows: sizes decide which kernels are taken."""
    gpu = Gpu(config, scheme, max_model_len=8192)
    steps = {f"decode{count}": gpu.decode(count) for count in DECODED}
    steps |= {f"decode{count}+long": gpu.decode(count, longest=2000) for count in (1, 8, 33)}
    if not scheme.exact:
        steps |= {f"decode{count}+shared": gpu.decode(count, shared=True, longest=600) for count in (8, 33)}
    steps |= {f"prompt{count}": gpu.mixed([(0, count, True)]) for count in PROMPTED}
    steps |= {f"told{count}": gpu.mixed([(0, count, True)], with_ends=False) for count in (32, 600)}
    steps["mixed"] = gpu.mixed([*decoding(2), (8, 9, True)])
    steps["mixed+many"] = gpu.mixed([*decoding(40), (0, 300, True), (0, 50, False)])
    for name, noted in steps.items():
        yield from ((name + what, notes) for what, notes in noted)


# ---- Models and schemes.

CPU_SCHEMES = {
    "float32": Scheme("float32"),
    "float32,kv=float32": Scheme("float32", kv="float32"),
    "bfloat16": Scheme("bfloat16"),
    "bfloat16,kv=int8": Scheme("bfloat16", kv="int8"),
    "int8": Scheme("bfloat16", "int8"),
    "int8,unrounded": Scheme("bfloat16", "int8", rounded=False),
    "int4": Scheme("bfloat16", "int4"),
    "int4,unrounded": Scheme("bfloat16", "int4", rounded=False),
    "int4,kv=int8": Scheme("bfloat16", "int4", kv="int8"),
}
BLOCK_SCHEMES = {
    "blocks": Scheme("bfloat16", parts=True),
    "blocks,unrounded": Scheme("bfloat16", rounded=False, parts=True),
}
BF16 = Scheme("bfloat16", kv="bfloat16")
GPU_SCHEMES = {
    "bfloat16": BF16,
    "bfloat16,exact": replace(BF16, exact=True),
    "bfloat16,kv=fp8": replace(BF16, kv="fp8"),
    "float16": Scheme("float16", kv="float16"),
    "float32": Scheme("float32", kv="float32"),
    "int8": replace(BF16, quantization="int8"),
    "int4": replace(BF16, quantization="int4"),
    "int4,kv=fp8": replace(BF16, quantization="int4", kv="fp8"),
    "fp8": replace(BF16, quantization="fp8"),
    "fp8,exact": replace(BF16, quantization="fp8", exact=True),
    "fp8,kv=fp8": replace(BF16, quantization="fp8", kv="fp8"),
    "fp8,kv=fp8,exact": replace(BF16, quantization="fp8", kv="fp8", exact=True),
}
ODD = {  # what no tiny config of a family has: panels of gates and values, widths that are not quantized or not fp8
    "odd": ("LlamaForCausalLM", {"intermediate_size": 40}),
    "narrow": ("LlamaForCausalLM", {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WIDE = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}


def tiny_configs() -> dict[str, dict[str, Any]]:
    """Every tiny config of every family with kernels, and some odd ones, under names such as LlamaForCausalLM.0."""
    configs = {
        f"{name}.{variant}": {"architectures": [name], **like}
        for name, family in FAMILIES.items()
        for variant, like in enumerate(family.like)
        if name in CHECKED
    }
    odd = {f"{name}.{what}": configs[f"{name}.0"] | changes for what, (name, changes) in ODD.items()}
    return configs | odd


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


Steps = dict[str, tuple[Lines, Flow]]


def record_all(beginnings: tuple[str, ...] = ("",)) -> Steps:
    """Note all steps whose key begins so: key → lines and flow."""
    steps: Steps = {}
    for case, record in cases():
        if f"{case}/".startswith(beginnings) or any(one.startswith(f"{case}/") for one in beginnings):
            for step, notes in record():
                steps[f"{case}/{step}"] = notes.lines, notes.flow
    return {key: noted for key, noted in steps.items() if key.startswith(beginnings)}


# ---- Storing and comparing.


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
    "_int_row": "_int_gemv",
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


def main() -> int:
    """Record, show or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", choices=["record", "compare", "show"])
    parser.add_argument("golden", type=Path, help="the stored lists, *.json or *.json.gz")
    parser.add_argument("beginnings", nargs="*", default=[""], help="of the keys: cpu/, gpu/LlamaForCausalLM.0/int4")
    parser.add_argument("--with-flow", action="store_true", help="compare which memory is given, too")
    parser.add_argument("--other", type=Path, help="compare with these stored lists instead of recording anew")
    args = parser.parse_args()
    beginnings = tuple(args.beginnings)
    if args.work == "record":
        write(record_all(beginnings), args.golden)
        return 0
    expected = {key: value for key, value in read(args.golden).items() if key.startswith(beginnings)}
    if args.work == "show":
        for key in expected:
            print(key, *kernels_of(key, expected, args.with_flow), sep="\n    ")
        return 0
    found = read(args.other) if args.other else record_all(beginnings)
    found = {key: value for key, value in found.items() if key.startswith(beginnings)}
    told = differences(expected, found, args.with_flow)
    missing = [key for key in expected if key not in found]
    for key, how in told.items():
        print(key, how, sep="\n")
    print(f"{len(found)} steps, {len(told)} differ, {len(missing)} are missing", *missing[:10])
    return 1 if told or missing else 0


if __name__ == "__main__":
    sys.exit(main())
