"""Rank 0's side: start or await the other ranks, compare them, tell them what to load, and join them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from penstock.api.drafting import group_states
from penstock.api.engine.start import count_blocks
from penstock.api.ranks.identity import identify, require_credentials
from penstock.api.ranks.share import MESH_TIMEOUT_S, count_state, cut_cache, cut_share, find_part, make_layout
from penstock.cache.group import Grouping
from penstock.config import EngineConfig, Resolved
from penstock.errors import InvalidConfig, quote
from penstock.host.machine import free_memory_bytes
from penstock.models.files import Checkpoint
from penstock.models.spec import ModelSpec
from penstock.ops import cpu
from penstock.parallel import Mesh, OneRank, Segment, open_mesh
from penstock.runner.cpu.runner import Runner
from penstock.runner.memory import BlockMemory
from penstock.runner.ranks.backends.local import LocalRanks
from penstock.runner.ranks.backends.task import RankTask
from penstock.runner.ranks.executor import RankExecutor
from penstock.runner.ranks.facts import describe_ranks
from penstock.runner.ranks.flow import HiddenReceiver
from penstock.runner.ranks.group import Backend, RankGroup
from penstock.runner.ranks.keeping import SharedStore
from penstock.runner.ranks.link import Credentials, Listener
from penstock.runner.ranks.messages import Setup
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.open import RankPart

LOOPBACK = "127.0.0.1"
LOCAL_WAIT_S = 120.0  # for processes of this machine
NODES_WAIT_S = 600.0  # for other machines, which may have to copy the model first
SECRET_BYTES = 32
RAY_THREADS = 1  # of a rank, and CPUs that Ray reserves for it, unless the user says


class Ranks:
    """The other ranks, from their start until they are joined with rank 0's runner."""

    def __init__(self, config: EngineConfig, path: Path, spec: ModelSpec, num_replicas: int = 1) -> None:
        """Make the ranks of one of `num_replicas` engines of this machine."""
        if config.node_rank:
            raise InvalidConfig(
                f"node_rank={config.node_rank} computes for machine 0: run penstock serve with it there, and this on "
                "machine 0 with node_rank=0"
            )
        self.config, self.spec = config, spec
        self.layout = make_layout(config)
        self._shares = [cut_share(spec, config, rank) for rank in range(self.layout.num_ranks)]  # refuses first of all
        self._path, self._num_replicas = path, num_replicas
        self.mesh: Mesh = OneRank()
        self._store: SharedStore | None = None
        uses_ray, own = config.distributed_executor_backend == "ray", None
        if uses_ray or self.layout.num_nodes > 1:
            credentials = require_credentials(config)
        else:
            credentials = own = Credentials(secrets.token_bytes(SECRET_BYTES))
        self.host, port = LOOPBACK, 0
        backend: Backend = LocalRanks(partial(self._make_tasks, own))
        if uses_ray:
            backend, self.host = self._make_ray()
        elif self.layout.num_nodes > 1:
            self.host, port = config.master_addr, config.master_port
        self.group = RankGroup(self.layout, Listener(self.host, port, credentials), backend)

    @property
    def share(self) -> ModelSpec:
        """The spec of rank 0."""
        return self._shares[0]

    def cut_cache(self, grouping: Grouping, settings: Resolved) -> Grouping:
        """Return the groups that rank 0 keeps."""
        return cut_cache(grouping, self.share, settings.kv_cache_dtype, settings.block_size)

    def _make_ray(self) -> tuple[Backend, str]:
        """Return the ranks that Ray starts, and this machine's address in its cluster."""
        from penstock.runner.ranks.backends.ray import RayRanks

        threads = self.config.threads or RAY_THREADS
        ranks = RayRanks(partial(self._make_tasks, None), threads, self.config.ray_placement)
        return ranks, ranks.address

    def _make_tasks(self, credentials: Credentials | None, port: int) -> Sequence[RankTask]:
        return make_tasks(self.config, str(self._path), 0, (self.host, port), credentials, self._num_replicas)

    def gather(self, described: Mapping[str, Any], checkpoint: Checkpoint | None, kv_dtype: str) -> int:
        """Start or await the other ranks, and require that they are as this one is; returns the free memory."""
        wait_s = find_patience(self.config)
        self.group.gather(identify(self.config, described, checkpoint), wait_s)
        return self._find_memory(kv_dtype)

    def _find_memory(self, kv_dtype: str) -> int:
        """Return the free memory of one machine that would have as much room for a cache as the smallest machine has,
        which keeps its stages' part of it."""
        own = [count_state(share, kv_dtype) for share in self._shares]
        free = {0: free_memory_bytes()}
        for rank, hello in self.group.hellos.items():
            node = self.layout.node(rank)
            free[node] = min(free.get(node, hello.free_bytes), hello.free_bytes)
        parts = {node: sum(own[rank] for rank in self.layout.list_ranks(node)) for node in free}
        whole = count_state(self.spec, kv_dtype)
        return min(free[node] * whole // max(1, part) for node, part in parts.items())

    def set_up(self, spec: ModelSpec, settings: Resolved) -> None:
        """Tell the other ranks what to load: they begin at once."""
        self.spec = spec
        self._shares = [cut_share(spec, self.config, rank) for rank in range(self.layout.num_ranks)]
        grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
        values = {field.name: getattr(settings, field.name) for field in fields(Resolved) if field.name != "settings"}
        num_blocks, setups = count_blocks(grouping, settings), {}
        segment = Segment(self.layout.num_shards) if self.layout.num_shards > 1 else None
        for rank in self.group.hellos:
            following = self.layout.find_next(rank)
            address = None if following is None else self._find_address(following)
            setups[rank] = Setup(values, num_blocks, self._find_segment(rank, segment), address)
        self.group.set_up(setups)
        self.mesh = open_mesh("shm", 0, self.layout.num_shards, segment or "", timeout_s=MESH_TIMEOUT_S)

    def _find_segment(self, rank: int, own: Segment | None) -> str:
        """Return where a rank meets those that share its layers, who must be on its machine."""
        first, hellos = rank - self.layout.shard(rank), self.group.hellos
        node = hellos[first].node if first else os.uname().nodename
        if own is not None and hellos[rank].node != node:
            raise InvalidConfig(
                f"ranks {first} and {rank} share layers, but are on machines {quote(node)} and "
                f"{quote(hellos[rank].node)}: tensor-parallel ranks share memory; set ray_placement=STRICT_PACK, or "
                "raise pipeline_parallel_size instead"
            )
        return "" if own is None else hellos[first].segment if first else own.address

    def _find_address(self, rank: int) -> tuple[str, int]:
        if rank == 0:
            return self.host, self.group.port
        return self.group.hellos[rank].host, self.group.hellos[rank].port

    def find_part(self, grouping: Grouping, settings: Resolved) -> RankPart:
        """Return what rank 0 keeps of each block in the store."""
        return find_part(grouping, self.spec, settings, 0)

    def share_store(self, own: BlockStore, memory: BlockMemory) -> SharedStore:
        """Return the store of all ranks, which `join` connects."""
        self._store = SharedStore(own, memory, self.group)
        return self._store

    def join(self, runner: Runner) -> RankExecutor:
        """Wait until all have loaded; returns the executor of all."""
        upstream = self.group.join()
        facts = describe_ranks(self.group, runner, [one.stage or range(self.spec.num_layers) for one in self._shares])
        receiver = None if upstream is None else HiddenReceiver(upstream, self.layout.num_shards)
        return RankExecutor(runner, self.group, receiver, self.mesh, facts, self._store)

    def close(self) -> None:
        self.group.close()
        self.mesh.close()


def find_patience(config: EngineConfig) -> float:
    """Return how long ranks may be late, in seconds."""
    is_local = config.nnodes == 1 and config.distributed_executor_backend == "mp"
    return LOCAL_WAIT_S if is_local else NODES_WAIT_S


def make_tasks(
    config: EngineConfig,
    model: str,
    node: int,
    address: tuple[str, int],
    credentials: Credentials | None = None,
    num_replicas: int = 1,
) -> list[RankTask]:
    """Make the tasks of a machine's ranks but rank 0, each with its share of the cores. Ray's are all on machine 0."""
    layout = make_layout(config)
    ranks = layout.list_ranks(node)
    options = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    threads = config.threads or (
        RAY_THREADS if config.distributed_executor_backend == "ray" else share_cores(num_replicas * len(ranks))
    )
    wait_s = find_patience(config)
    return [RankTask(rank, layout, model, options, *address, credentials, wait_s, threads) for rank in ranks if rank]


def share_cores(num_ranks: int) -> int:
    return max(1, cpu.available_cores() // num_ranks)
