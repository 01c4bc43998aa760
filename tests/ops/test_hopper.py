"""Which kernel computes prompt attention; what Hopper's computes is tests/gpu's to check: Gluon has no interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import test_triton  # noqa: F401  before Triton is imported

pytest.importorskip("triton.experimental.gluon")

from penstock.ops.attention.attention import Work, attention  # noqa: E402
from penstock.ops.triton import launch  # noqa: E402
from penstock.ops.triton.attention import prefill  # noqa: E402
from penstock.ops.triton.attention.attend import PagedStep, Scoring  # noqa: E402
from penstock.ops.triton.attention.hopper import tiles  # noqa: E402
from penstock.ops.triton.tuning import MAX_SHORT_PROMPT, MIN_HOPPER_TOKENS  # noqa: E402
from tests.ops.examples.attention import paged  # noqa: E402

LONG = MAX_SHORT_PROMPT + 1
TILES = torch.zeros((1, 2), dtype=torch.int32)
PLAIN = Scoring(0.1, None, 0, None, None)


def make_step(
    num_tokens: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    size: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PagedStep]:
    pool = torch.zeros(6, 2, kv_heads, block_size, size).to(cache_dtype or dtype)
    numbers = torch.zeros(4, dtype=torch.int32)
    q = torch.zeros(num_tokens, heads, size, dtype=dtype)
    return q, PagedStep(pool[:, 0].transpose(2, 3), pool[:, 1], numbers.view(1, 4), numbers[:2], numbers[:1])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)


def chosen(step: tuple[Tensor, PagedStep], scoring: Scoring = PLAIN, work: Work | None = None) -> bool:
    return prefill.uses_hopper(*step, scoring, work or Work(0, TILES, longest=LONG))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "shape", [{"heads": 8}, *({"block_size": size} for size in (16, 32, 64, 128)), {"num_tokens": 2}]
)
def test_it_takes_prompts_of_long_contexts(shape: dict[str, Any]) -> None:
    assert chosen(make_step(**shape))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "shape",
    [
        *({"heads": 2 * group} for group in (1, 2, 3, 8, 16)),
        {"dtype": torch.float16},
        {"size": 64},
        {"size": 256},
        {"block_size": 8},
        {"block_size": 24},
        {"block_size": 256},
        {"dtype": torch.float32},
        {"cache_dtype": torch.float8_e4m3fn},
        {"cache_dtype": torch.float16},
    ],
)
def test_other_shapes_and_types_are_left_to_the_other_kernel(shape: dict[str, Any]) -> None:
    assert not chosen(make_step(**shape))


def apart_heads(q: Tensor, step: PagedStep) -> tuple[Tensor, PagedStep]:
    """Blocks that are no whole number of rows apart."""
    n, k, d, p = step.k_cache.shape
    wide = torch.zeros(n, k * d * p + 8, dtype=q.dtype)
    return q, step._replace(v_cache=wide.as_strided((n, k, p, d), (wide.shape[1], d * p, d, 1)))


def unaligned(q: Tensor, step: PagedStep) -> tuple[Tensor, PagedStep]:
    return torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), step


def odd_rows(q: Tensor, step: PagedStep) -> tuple[Tensor, PagedStep]:
    wide = torch.zeros(q.shape[0], q[0].numel() + 4, dtype=q.dtype)
    return wide.as_strided(q.shape, (wide.shape[1], q.shape[2], 1)), step


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("change", [apart_heads, unaligned, odd_rows])
def test_what_tma_cannot_read_is_left_to_the_other_kernel(change: Callable[..., tuple[Tensor, PagedStep]]) -> None:
    assert chosen(make_step()) and not chosen(change(*make_step()))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "scoring", [{"window": 33}, {"softcap": 20.0}, {"alibi": torch.zeros(8)}, {"sinks": torch.zeros(8)}]
)
def test_other_scores_are_left_to_the_other_kernel(scoring: dict[str, Any]) -> None:
    assert not chosen(make_step(), PLAIN._replace(**scoring))


@pytest.mark.usefixtures("hopper")
def test_lengths_decide() -> None:
    """The longest context where the host knows it, else the tokens of the step."""
    assert not chosen(make_step(4096), work=Work(0, TILES, longest=MAX_SHORT_PROMPT))
    assert chosen(make_step(MIN_HOPPER_TOKENS), work=Work(0, TILES))
    assert not chosen(make_step(MIN_HOPPER_TOKENS - 1), work=Work(0, TILES))


def test_it_is_for_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not chosen(make_step())  # a CPU, where kernels are interpreted
    launch.is_hopper.cache_clear()
    capabilities = [(8, 9), (9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    assert [launch.is_hopper(torch.device("cuda", index)) for index in range(3)] == [False, True, False]
    launch.is_hopper.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_a_triton_without_gluon_has_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "hopper", None)
    assert not chosen(make_step())


@pytest.mark.usefixtures("hopper")
def test_the_launch_has_a_descriptor_per_cache_and_keeps_none_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a layer are described once; tiles and rows are those of the step."""
    launched: list[tuple[Any, ...]] = []

    class Played:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launched.append((grid, *args))

    monkeypatch.setattr(launch, "count_sms", lambda device: 132)
    monkeypatch.setattr(prefill.hopper, "_prefill_hopper", Played())
    example = paged(1, [(1, 30), (300, 400)], 8, 2, 128, dtype=torch.bfloat16)
    example["k_cache"] = example["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    example["q"] = example["q"].bfloat16()
    count = torch.ones(1, dtype=torch.int32)
    step_tiles = torch.tensor([[1, first] for first in range(0, 300, 32)], dtype=torch.int32)
    for _ in range(2):
        attention.bodies["cuda"].function(**example, work=Work(0, step_tiles, num_tiles=count, longest=400))
    first, second = launched
    assert first[0] == (20,)
    assert first[2] is second[2] and first[3] is second[3] and not isinstance(first[2].base, Tensor)
    rows = (len(example["k_cache"]) - 1) * first[5].k_block + 2 * 16
    assert first[2].shape == [rows, 128] and first[2].block_shape == [16, 64]
    assert first[1].block_shape == [16, 4, 64] and first[1].shape == [301, 8, 128]
    assert first[4].count is count and first[9] == 0
    attention.bodies["cuda"].function(**example, work=Work(0, step_tiles, longest=400))
    assert launched[2][4].count is None and launched[2][9] == len(step_tiles)


class Pointer:
    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.values, self.at + more)


def run_in_python(function: Any, program: int, num_programs: int, *args: Any) -> Any:
    """Run a Gluon function of numbers and pointers as one program."""
    played = SimpleNamespace(
        num_programs=lambda axis: num_programs,
        program_id=lambda axis: program,
        maximum=max,
        minimum=min,
        where=lambda condition, a, b: a if condition else b,
        load=lambda pointer: pointer.values[pointer.at],
    )
    sizes = {name: getattr(tiles, name).value for name in ("ROWS", "NUM")}
    return FunctionType(function.fn.__code__, {"gl": played, **sizes})(*args)


@pytest.mark.parametrize("num_programs", [1, 7, 132])
@pytest.mark.parametrize("num_tiles", [0, 1, 3, 17, 160])
def test_every_tile_with_queries_is_computed_once(num_tiles: int, num_programs: int) -> None:
    """By one program, for each group of heads; padding tiles, which come last, by none."""
    flat = [number for tile in range(num_tiles) for number in (tile, 32 * tile)] + [-1, -1] * 5
    work = SimpleNamespace(tiles=Pointer(flat), num_groups=8)
    found = []
    for program in range(num_programs):
        rounds = run_in_python(tiles.count_rounds, program, num_programs, work, num_tiles)
        for turn in range(rounds + 2):  # the next two are loaded ahead
            tile = run_in_python(tiles.find_tile, program, num_programs, work, num_tiles, turn)
            if turn < rounds:
                found.append(tile)
    assert sorted(found) == [(tile, 32 * tile, group) for tile in range(num_tiles) for group in range(8)]


@pytest.mark.parametrize("pack", [1, 2, 4, 8])
def test_a_tile_reads_the_blocks_that_its_queries_see(pack: int) -> None:
    for count, length in [(0, 0), (1, 1), (300, 300), (128, 128), (129, 129), (5, 1000), (1, 129)]:
        for first_query in range(0, max(count, 1), 128 // pack):
            first = length - count + first_query
            end = min(length, first + 128 // pack)
            blocks = run_in_python(tiles.count_blocks, 0, 1, first, length, pack)
            assert blocks == max(1, -(-end // 128))  # none would keep both sides waiting for each other
