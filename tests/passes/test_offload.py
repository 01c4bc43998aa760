"""Weights in host memory: which ones they are, that they are there when they are multiplied, and what it takes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as other tests need it
pytest.importorskip("triton")

from penstock import layers  # noqa: E402
from penstock.config import GIB, EngineConfig  # noqa: E402
from penstock.config.resolve import offload_use  # noqa: E402
from penstock.errors import InvalidConfig  # noqa: E402
from penstock.models import decoder, load  # noqa: E402
from penstock.models.decoder import Decoder  # noqa: E402
from penstock.models.spec import spec_from_config  # noqa: E402
from penstock.ops import OpTable  # noqa: E402
from penstock.ops.triton import launch  # noqa: E402
from penstock.passes import offload  # noqa: E402
from penstock.passes.load import load_lowered  # noqa: E402
from penstock.passes.lora_table import make_lora_table  # noqa: E402
from penstock.passes.lower import RULES, row_limits  # noqa: E402
from penstock.passes.offload import Offload, OffloadedBlock, OffloadQuota, pinned, stream  # noqa: E402
from penstock.passes.offload.block import Stay  # noqa: E402
from penstock.passes.offload.stream import Copier, LayerCopy, Route, StreamCopier  # noqa: E402
from penstock.quant.dense import Matrix  # noqa: E402
from penstock.quant.fp8 import as_fp8  # noqa: E402
from penstock.quant.ints import round_to_ints  # noqa: E402
from penstock.runner.cuda.gpu import known_facts  # noqa: E402
from tests.models.paged import Paged  # noqa: E402
from tests.passes.models import describe, make  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [200], [3, 1, 4]]
SIZES = st.lists(st.integers(1, 1000), max_size=5)


class Plain:
    """Finish blocks by leaving them as they are."""

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    def __call__(self, block: layers.AnyBlock, is_last: bool) -> layers.AnyBlock:
        return block


def move_out(model: Decoder, num_bytes: int) -> Offload:
    """Offload weights of a model that is loaded."""
    made = Offload(Plain(model.ops), num_bytes, model.spec, CPU)
    model.blocks = [made(block, block is model.blocks[-1]) for block in model.blocks]
    made.finish(model)
    return made


class CheckedCopier(Copier):
    """Notes copies that nobody has waited for yet."""

    def __init__(self) -> None:
        self.under_way: list[LayerCopy] = []

    def start(self, each: LayerCopy) -> None:
        self.under_way.append(each)
        super().start(each)

    def wait_for(self, each: LayerCopy) -> None:
        self.under_way.remove(each)


def answer(model: Decoder) -> torch.Tensor:
    """The logits of prompts in chunks, and of single tokens."""
    driver = Paged(model)
    driver.checks_ends = False
    rows = driver.run(PROMPTS, 4, chunk=6)
    return torch.stack([logits for row in rows for logits in row.logits])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoder, load):
        monkeypatch.setattr(module, "dense", Matrix)


# The choice


@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_never_too_little_and_at_most_one_weight_too_much(
    given: list[tuple[list[int], list[int]]], share: float
) -> None:
    """Where bytes are as values. Breaks when a layer's own share is forgotten, or rounded down."""
    sizes = [sum(map(sum, layer)) for layer in given]
    wanted = int(share * sum(sizes))
    quota = OffloadQuota(wanted, sizes)
    for number, layer in enumerate(given):
        before = quota.chosen
        picked = quota.take(layer)
        assert len(set(picked)) == len(picked)
        assert quota.chosen - before == sum(layer[tier][place] for tier, place in picked)
        assert quota.chosen >= wanted * sum(sizes[: number + 1]) // max(1, sum(sizes))
        if any(tier for tier, _ in picked):
            assert len([1 for tier, _ in picked if not tier]) == len(layer[0])  # experts first
    assert quota.chosen < wanted + max((size for layer in given for tier in layer for size in tier), default=1)


def test_layers_take_turns() -> None:
    quota = OffloadQuota(400, [100] * 8)
    found = [quota.take([[], [60, 30, 10]]) for _ in range(8)]
    assert [sum((60, 30, 10)[place] for _, place in picked) for picked in found] == [60, 60, 30, 60, 60, 30, 60, 60]


# Products


def _as_ints(kind: str) -> Callable[[Any], Any]:
    return lambda one: round_to_ints(one.ops, one.weight, one.bias, kind, torch.float32)


SCHEMES: dict[str, Callable[[Any], Any]] = {
    "16-bit": lambda one: one,
    "fp8": as_fp8,
    "int8": _as_ints("int8"),
    "int4": _as_ints("int4"),
}


@pytest.mark.parametrize("share", [0.2, 0.6, 2.0])
@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"])
def test_the_same_bits_as_without(family: str, kind: str, share: float, as_on_a_gpu: None) -> None:
    """Breaks when a weight is read before it is copied, or after another layer's took its place."""
    config = describe(family, num_hidden_layers=5, hidden_size=64, vocab_size=256)
    model: Any = load.load_model(None, spec_from_config(config), dummy_seed=3)
    for block in model.blocks:
        parts = [linear for part in (block.mixer, block.ffn) for _, linear in part.linears()]
        parts += block.ffn.stacks() if isinstance(block.ffn, layers.Experts) else ()
        for part in parts:
            part.scheme = SCHEMES[kind](part.scheme)
    plain = answer(model)
    total = sum(
        tensor.nbytes
        for block in model.blocks
        for one in offload._find_weights(block)
        for _, tensor in offload._tensors(one)
    )
    made = move_out(model, int(share * total))
    assert min(share, 1.0) * total <= made.quota.chosen <= total
    for buffer in made.stream.buffers:
        buffer.fill_(255)
    made.stream.copier = copier = CheckedCopier()
    assert torch.equal(answer(model), plain)
    assert not copier.under_way  # or a captured step would end before its copies
    blocks = [block for block in model.blocks if isinstance(block, OffloadedBlock)]
    assert len(blocks) >= (3 if share < 0.5 else 5)
    inside = {tensor.untyped_storage().data_ptr() for tensor in made.stream.buffers}
    outside = {stay.host.data_ptr() for block in blocks for stay in block.stays}
    for block in blocks:
        for stay in block.stays:
            own = getattr(stay.scheme, stay.name)
            assert own.untyped_storage().data_ptr() in inside or stay.mapped is not None and own.data_ptr() in outside


def test_a_bug_in_the_order_of_copies_is_caught(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third layer's weights arrive while the first still computes."""
    config = describe("LlamaForCausalLM", num_hidden_layers=5, hidden_size=64, vocab_size=256)
    model: Any = load.load_model(None, spec_from_config(config), dummy_seed=3)
    plain = answer(model)
    move_out(model, GIB)
    enter = Route.enter

    def too_early(self: Route, number: int, copier: Any) -> None:
        enter(self, number, copier)
        self.leave(number, copier)

    monkeypatch.setattr(Route, "enter", too_early)
    assert not torch.equal(answer(model), plain)


def test_lowered_blocks_too(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that were fused read what lies in the buffers; warm-up is told where few rows end."""
    config = describe("Qwen3MoeForCausalLM", num_hidden_layers=4, hidden_size=64, vocab_size=256)
    model = make(config, RULES, monkeypatch, "cpu")
    plain = answer(model)
    made = move_out(model, GIB)
    assert torch.equal(answer(model), plain)
    blocks = [block for block in model.blocks if isinstance(block, OffloadedBlock)]
    few = {made.stream.max_few_rows}
    experts: Any = model.blocks[0].ffn
    expected = int(offload.FEW_SHARE * experts.gate_up.num_matrices / experts.router.rule.num_chosen)
    assert few == {expected} and expected > 0 and few <= set(row_limits(model))
    stacks = sum(stay.host.nbytes for block in blocks for stay in block.stays if stay.mapped is not None)
    copied = {
        name: sum(one.num_bytes for one in route.copies)
        for name, route in vars(made.stream).items()
        if isinstance(route, Route)
    }
    assert 0 < copied["few"] <= copied["many"] - stacks  # few rows copy no stack


def test_both_forms_of_a_block_with_adapters(as_on_a_gpu: None) -> None:
    """Steps with adapters and without multiply from the same buffers."""
    spec = spec_from_config(describe("Qwen3MoeForCausalLM", num_hidden_layers=4, hidden_size=64, vocab_size=256))
    table = make_lora_table(spec, 2, 16, torch.float32, CPU)
    model: Any = load_lowered(None, spec, dummy_seed=3, loras=table)
    plain, shapes = answer(model), [id(one) for block in model.blocks for one in offload._find_weights(block)]
    made = move_out(model, GIB)
    for buffer in made.stream.buffers:
        buffer.fill_(255)
    assert torch.equal(answer(model), plain)
    forms = [(block.block.lowered, block.block.adapted) for block in model.blocks]
    for lowered, adapted in forms:
        inner = [{id(one) for one in offload._find_weights(form)} for form in (lowered, adapted)]
        assert inner[0] == inner[1] and inner[0] <= set(shapes)


# Streams


class Recorder:
    """A stream that notes what it is told."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.count = name, notes, 0

    def record_event(self) -> str:
        self.count += 1
        self.notes.append(f"{self.name}: record {self.name}{self.count}")
        return f"{self.name}{self.count}"

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name}: wait {event}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    told: list[str] = []
    steps, copies = Recorder("step", told), Recorder("copy", told)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(LayerCopy, "copy", lambda self: told.append(f"copy: load {self.hosts}"))
    yield told


def test_events_between_steps_and_copies(notes: list[str]) -> None:
    """Copies wait for the layer whose buffer they take, and a step ends with all of them awaited: else the graph that
    is captured of it has ends that nobody joins."""
    route, copier = Route(), StreamCopier()
    route.copies = [LayerCopy(str(number)) for number in range(3)]  # type: ignore[arg-type]
    for number in range(3):
        route.enter(number, copier)
        notes.append(f"step: layer {number}")
        route.leave(number, copier)
    assert notes == [
        "step: record step1",
        "copy: wait step1",
        "copy: load 0",
        "copy: record copy1",
        "copy: load 1",
        "copy: record copy2",
        "step: wait copy1",
        "step: layer 0",
        "step: record step2",
        "copy: wait step2",
        "copy: load 2",
        "copy: record copy3",
        "step: wait copy2",
        "step: layer 1",
        "step: wait copy3",
        "step: layer 2",
    ]


def test_kernels_of_such_a_block_start_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when one may read weights before its predecessor has ended; of few rows that read in place it may."""
    monkeypatch.setattr(launch, "meta_capability", (9, 0))
    launch.has_pdl.cache_clear()
    seen: list[bool] = []
    x = torch.empty(1, 4, device=META)

    class Inner:
        mixer = ffn = None

        def __call__(self, x: torch.Tensor, step: Any, memory: Any) -> torch.Tensor:
            seen.append(launch.pdl_options(x)["PDL"])
            return x

    weights = stream.WeightStream(META)
    stays = [Stay(Matrix(OpTable("cpu"), torch.empty(2, 4, device=META)), "weight", x, mapped) for mapped in (None, x)]
    inner: Any = Inner()
    copied, read = (OffloadedBlock(inner, [stay], weights) for stay in stays)
    weights.limit_few_rows(2)
    weights.allocate()
    step: Any = None
    for block, rows in ((copied, 1), (copied, 3), (read, 1), (read, 3)):
        block(x.expand(rows, 4), step, None)
    assert seen == [False, False, True, False] and launch.pdl_options(x)["PDL"]
    assert copied.kernels != read.kernels
    launch.has_pdl.cache_clear()


# Page-locked memory


class Runtime:
    """CUDA's functions that lock pages."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert not self.error or not self.locked
        self.locked |= {} if self.error else {address: num_bytes}
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        return 0 * self.locked.pop(address)


def test_pages_are_locked_as_long_as_a_tensor_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when they outlive the engine, or are given back while locked."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = pinned.PinnedPages.lock(12_345)
    values = torch.frombuffer(pages, dtype=torch.uint8)[:12_000].view(torch.bfloat16).view(60, 100)
    assert runtime.locked == {values.data_ptr(): 12_345} and values.data_ptr() % 4096 == 0
    del pages
    gc.collect()
    assert runtime.locked and torch.equal(values.fill_(2.0), torch.full_like(values, 2.0))
    del values
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(InvalidConfig, match="0.01 GiB of memory could not be page-locked .CUDA error 2.: lower it"):
        pinned.PinnedPages.lock(10 << 20)


# Memory

LLAMA_8B = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192},
}
QWEN3_30B = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "vocab_size": 151936},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize("wanted", [0.5, 8.0, 1000.0])
@pytest.mark.parametrize(
    ("family", "sizes"), [("LlamaForCausalLM", LLAMA_8B), ("Qwen3MoeForCausalLM", QWEN3_30B)], ids=["8B", "30B-A3B"]
)
def test_what_is_counted_beforehand_holds(family: str, sizes: dict[str, Any], wanted: float) -> None:
    """With the real shapes, on the meta device: no less leaves the GPU, and buffers are no larger."""
    config = describe(family, **sizes)
    spec = spec_from_config(config, 4096)
    gpu = known_facts(spec, "bfloat16", "H200", 140 * GIB, (9, 0))
    use = offload_use(EngineConfig(cpu_offload_gb=wanted), gpu)
    made: list[Offload] = []
    with pytest.MonkeyPatch.context() as patch:
        finish = Offload.finish

        def note(self: Offload, model: Any) -> None:
            made.append(self)
            finish(self, model)

        patch.setattr(Offload, "finish", note)
        load_lowered(None, spec, dtype=torch.bfloat16, dummy_seed=0, device=META, offload_bytes=int(wanted * GIB))
    chosen, buffers = made[0].quota.chosen, sum(one.nbytes for one in made[0].stream.buffers)
    assert use.host_bytes <= chosen + 2**20 * spec.num_layers and use.buffer_bytes >= buffers > 0
    if wanted == 8.0:
        assert use.buffer_bytes <= 3 * buffers  # and not far from it
        assert abs(chosen - 8 * GIB) < 2 * 2**30 * (0.4 if "Moe" in family else 0.1)
