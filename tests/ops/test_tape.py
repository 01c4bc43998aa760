"""What is recorded is replayed to the last bit, and what cannot be replayed is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops import OPS, Op
from penstock.ops.cpu.runtime.arena import ALIGNMENT, Arena, Layout
from penstock.ops.cpu.runtime.library import KERNELS
from penstock.ops.cpu.runtime.tape import Obstacle, Tape, record
from tests.ops.check import results, same_bits
from tests.ops.examples import example_of, examples_of, normal, rows_of
from tests.ops.examples.experts import other_ids

PANELS, WEIGHT = ops.pack_panels(normal(1, 48, 48, scale=0.15)), normal(2, 48)
WIDER = ops.pack_panels(normal(3, 48, 24, scale=0.2))
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale", "cache")
BACKWARDS = torch.arange(63, -1, -1)


def _network(x: Tensor) -> Tensor:
    """Some layers with a stream that outlives their other tensors; views and strided parts among them."""
    for _ in range(6):
        y = ops.linear(ops.rms_norm(x, WEIGHT, 1e-5), PANELS, 48)
        y = ops.activation(ops.add(y[:, :24], y.view(-1, 2, 24)[:, 1], 0.5), "silu")
        x = ops.add(x, ops.linear(y, WIDER, 48))
        x = ops.layer_norm(ops.gather(BACKWARDS[-x.shape[0] :], x), WEIGHT, None, 1e-5, residual=x)
    return x


def _recorded(function: Callable[[], Any], arena: Arena | None = None) -> Tape[Any]:
    _, tape = record(function, arena or Arena())
    assert isinstance(tape, Tape), tape
    return tape


@pytest.mark.parametrize("num_rows", [2, 7, 40])
@torch.inference_mode()
def test_a_replay_gives_the_bits_of_the_calls(num_rows: int, path: str, threads: None) -> None:
    x = normal(3, num_rows, 48)
    result, tape = record(lambda: _network(x), Arena())
    assert isinstance(tape, Tape) and same_bits(result, _network(normal(3, num_rows, 48)))
    for seed in (4, 5, 3):
        x.copy_(normal(seed, num_rows, 48))
        assert same_bits(tape.replay(), _network(x))


@torch.inference_mode()
def test_tapes_share_their_memory_and_reuse_it_within() -> None:
    arena, inputs = Arena(), [normal(n, n, 48) for n in (64, 1, 9)]
    tapes = [_recorded(lambda x=x: _network(x), arena) for x in inputs]  # type: ignore[misc]
    assert arena.num_bytes <= 1 << 22 and sum(len(tape.kernels) for tape in tapes) > 100
    for x, tape in [*zip(inputs, tapes), *zip(inputs, tapes)]:
        assert same_bits(tape.replay(), _network(x))


@torch.inference_mode()
def test_memory_grows_without_moving_what_is_recorded() -> None:
    """The second tape needs more than the first left: breaks when a slab is enlarged in place."""
    arena, panels = Arena(), ops.pack_panels(normal(5, 1 << 16, 4))
    small, large = normal(6, 3, 4), normal(7, 40, 4)
    first = _recorded(lambda: ops.linear(small, panels, 1 << 16), arena)
    second = _recorded(lambda: ops.softcap(ops.linear(large, panels, 1 << 16), 30.0), arena)
    assert arena.num_bytes > 1 << 24
    assert same_bits(second.replay(), ops.softcap(ops.linear(large, panels, 1 << 16), 30.0))
    assert same_bits(first.replay(), ops.linear(small, panels, 1 << 16))


def test_live_tensors_never_overlap() -> None:
    """Random lives; breaks when a place is given back while a view of it is held, or merged wrongly."""
    rng, arena = np.random.default_rng(1), Arena()
    layout = Layout(arena)
    alive: list[tuple[Tensor, int]] = []
    for number in range(2000):
        if alive and rng.random() < 0.5:
            alive.pop(int(rng.integers(len(alive))))
        whole = layout.allocate(torch.empty(int(rng.integers(1, 3000)), dtype=torch.int32))
        assert whole.data_ptr() % ALIGNMENT == 0
        whole.fill_(number)
        alive.append((whole[whole.shape[0] // 2 :], number))
    assert all((part == number).all() for part, number in alive)
    alive.clear()
    del whole
    assert layout._free == [[(0, slab.nbytes)] for slab in arena.slabs]
    assert arena.num_bytes < 1 << 25


@torch.inference_mode()
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if "cpu" in op.bodies))
def test_every_op_can_be_replayed(name: str, path: str) -> None:
    """Each example on its own: the words of a call mean what its arguments meant."""
    op: Op[..., Any] = OPS[name]
    num_replayed = 0
    for index in range(len(examples_of(op))):
        example, wanted = example_of(op, index), example_of(op, index)
        expected = op(**wanted)
        result, tape = record(lambda example=example: op(**example), Arena())  # type: ignore[misc]
        if not isinstance(tape, Tape):
            continue
        num_replayed += 1
        written = [example[cache] for cache in CACHES if cache in example] if "slots" in example else []
        made = [] if result is None else results(result)
        for output in made:
            output.fill_(77.0)
        for value, fresh in zip(example.values(), example_of(op, index).values()):
            if isinstance(value, torch.Tensor):
                value.copy_(fresh)  # what the first call wrote in place
        for output in written:
            output.fill_(77.0)
        tape.replay()
        rows = list(range(rows_of(op).count(example)))
        assert same_bits(rows_of(op).outputs(example, result, rows), rows_of(op).outputs(wanted, expected, rows))
        assert all(same_bits(mine, same) for mine, same in zip(made, results(expected)))
    assert num_replayed > len(examples_of(op)) / 2


def test_every_kernel_takes_words(path: str) -> None:
    assert [kernel.name for kernel in KERNELS if not kernel.packed] == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: x[0].sum(),
        lambda x: x.tolist(),
        lambda x: x[0, 0].item(),
        lambda x: bool(x.any()),
        lambda x: x[torch.tensor([0])],
        lambda x: x.numpy().sum(),
        lambda x: torch.zeros(3),
        lambda x: torch.arange(3),
        lambda x: x.double(),
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_zeros(3),
        lambda x: torch.from_numpy(np.ones(3)),
        lambda x: x.t().reshape(-1),
        lambda x: x.__setitem__(0, 5.0),
        lambda x: torch.cat([x, x]),
    ],
)
@torch.inference_mode()
def test_what_torch_computes_is_an_obstacle(compute: Callable[[Tensor], Any]) -> None:
    x = normal(1, 3, 48)
    result, obstacle = record(lambda: (compute(x), ops.rms_norm(x, WEIGHT, 1e-5))[1], Arena())
    assert isinstance(obstacle, Obstacle) and obstacle.name.startswith("aten.")
    assert same_bits(result, ops.rms_norm(x, WEIGHT, 1e-5))


def test_a_bad_index_names_its_kernel_and_ends_the_replay() -> None:
    ids, at = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def all_of_it() -> tuple[Tensor, Tensor, Tensor]:
        x = ops.embedding(ids, PANELS, 48)
        y = ops.gather(at, x)
        return x, y, ops.scale(y, 2.0)

    tape = _recorded(all_of_it)
    last = tape.result[-1]
    last.fill_(5.0)
    ids[1], at[0] = 48, -1
    with pytest.raises(IndexError, match="embedding: an index points outside"):
        tape.replay()
    ids[1] = 0
    with pytest.raises(IndexError, match="gather: an index"):
        tape.replay()
    assert (last == 5.0).all()
    at[0] = 1
    tape.replay()
    assert not (last == 5.0).any()


def test_only_the_calls_of_its_own_thread() -> None:
    x = normal(9, 3, 48)

    def two() -> Tensor:
        other = threading.Thread(target=lambda: ops.rms_norm(x, WEIGHT, 1e-5))
        other.start()
        other.join()
        return ops.scale(x, 2.0)

    assert [kernel.name for kernel in _recorded(two).kernels] == ["scale"]


def test_a_failed_recording_leaves_nothing_behind() -> None:
    x = normal(9, 3, 48)
    with pytest.raises(ZeroDivisionError):
        record(lambda: ops.scale(x, 1 / 0), Arena())
    assert [kernel.name for kernel in _recorded(lambda: ops.scale(x, 2.0)).kernels] == ["scale"]


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_packed_matmul"])
@torch.inference_mode()
def test_a_tape_is_replayed_with_other_routes(name: str, path: str, threads: None) -> None:
    """Breaks when rows are sorted by their matrices outside the kernel."""
    op = OPS[name]
    for index in range(len(examples_of(op))):
        call = example_of(op, index)
        tape = _recorded(lambda call=call: op(**call))  # type: ignore[misc]
        for ids in (other_ids(call), torch.full_like(call["ids"], -1), call["ids"].clone()):
            call["ids"].copy_(ids)
            assert same_bits(tape.replay(), op(**call)), index
