"""One configuration of the engine and of what is asked of it, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations

from penstock.cache.group import Group, StateSpec, group_layers
from penstock.cache.kv import KVCache
from penstock.config import CAPACITIES, POLICIES
from tests.simulation.keeping import FakeStore, offload_to

KINDS = ("full", "window", "recurrent")
KIND_SETS = [kinds for size in (1, 2, 3) for kinds in combinations(KINDS, size)]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int = 0
    groups: tuple[Group, ...]
    block_size: int = 4
    num_blocks: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    policy: str = "fcfs"
    capacity: str = "ondemand"
    enable_prefix_caching: bool = True
    overlap: int = 0
    lazy: bool = True
    longest: int = 64  # prompt and answer of what fits for sure
    draft_rate: float = 0.0
    draft_accuracy: float = 0.7
    draft_longest: int = 4
    trees: bool = False  # of drafts are verified
    step_fault_rate: float = 0.0
    row_fault_rate: float = 0.0
    poison_rate: float = 0.0  # of requests
    abort_rate: float = 0.0  # per step
    special_rate: float = 0.3  # of requests that want siblings, beams, pooling or prompt log probabilities
    load: float = 1.0  # arriving work over what the device can do
    check_every: int = 8
    num_tenants: int = 1
    min_snapshot_stride: int = 1
    offloads: bool = False  # blocks go to a store, and come back from it
    loss_rate: float = 0.0  # of its saves and loads
    drop_rate: float = 0.0  # of its blocks, each time that one is asked for

    def make_store(self) -> FakeStore | None:
        return FakeStore(self.seed, self.loss_rate, self.drop_rate) if self.offloads else None

    def make_cache(self, store: FakeStore | None = None) -> KVCache:
        offloading = offload_to(store, 1 + self.seed % 9) if store is not None else None
        return KVCache(
            self.num_blocks,
            self.block_size,
            self.groups,
            self.enable_prefix_caching,
            self.min_snapshot_stride,
            offloading,
        )


def draw_groups(rng: random.Random, kinds: tuple[str, ...], block_size: int) -> tuple[Group, ...]:
    """Groups as they come out of a model with a few layers of each kind."""
    states: list[StateSpec | None] = []
    for kind in kinds:
        count = rng.randint(1, 3)
        if kind == "full":
            states += [StateSpec("full", bytes_per_position=4)] * count
        elif kind == "window":
            states += [StateSpec("window", bytes_per_position=4, window=rng.choice([1, 2, 5, 9, 16, 30]))] * count
        else:
            num_rows, row_bytes = rng.choice([(1, 4), (4, 4), (2, 20)])
            states += [StateSpec("recurrent", num_rows=num_rows, row_bytes=row_bytes)] * count
    rng.shuffle(states)
    return group_layers(states, block_size).groups


def draw_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    kinds = KIND_SETS[seed % len(KIND_SETS)]
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 8, 16])
    groups = draw_groups(rng, kinds, block_size)
    longest = rng.choice([24, 36, 48, 80])
    alone = KVCache(1, block_size, groups).blocks_to(longest)
    return Scenario(
        seed=seed,
        min_snapshot_stride=1 if seed % 5 else 512,
        groups=groups,
        block_size=block_size,
        longest=longest,
        num_blocks=int(alone * rng.choice([1, 1.3, 2, 2.5, 3, 3, 4, 5, 6, 10])),
        max_num_seqs=rng.choice([1, 2, 4, 6, 6, 8, 8, 8, 12, 12]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128]),
        policy=rng.choice(POLICIES),
        capacity=CAPACITIES[rng.random() < 0.25],
        enable_prefix_caching=rng.random() < 0.85,
        overlap=min(rng.randint(0, 3), 3 * (seed % 3 != 1)),  # a tree waits for its sequence's plans
        lazy=rng.random() < 0.7,
        draft_rate=max(rng.choice([0, 0.5, 0.9]), 0.5 * (seed % 3 == 1)),
        draft_accuracy=rng.choice([0.3, 0.7, 0.9]),
        draft_longest=rng.choice([2, 4, 8]),
        trees=seed % 3 > 0,
        step_fault_rate=rng.choice([0, 0, 0.005, 0.02]),
        row_fault_rate=rng.choice([0, 0, 0.002]),
        poison_rate=rng.choice([0, 0, 0.02]),
        abort_rate=rng.choice([0, 0.01, 0.04]),
        special_rate=rng.choice([0, 0.2, 0.5, 0.8]),
        load=rng.choice([0.5, 1.0, 2.0]),
        check_every=rng.choice([1, 4, 8, 16]),
        num_tenants=rng.choice([1, 1, 2, 3]),
        offloads=seed % 8 > 4,  # by number, so that worlds are as they were
        loss_rate=(0, 0.02, 0.2)[seed // 8 % 3],
        drop_rate=(0, 0, 0.05, 0.3)[seed // 24 % 4],
    )
