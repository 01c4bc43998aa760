"""The process of a rank that does not sample: `python -m penstock.api.ranks.process`, which ends with rank 0's.

The first line of standard input says what to load; afterwards the pipe's end tells that who started it is gone.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from penstock.api.drafting import group_states
from penstock.api.engine.keep import keep_layers
from penstock.api.engine.load import load_weights
from penstock.api.engine.start import make_memory
from penstock.api.model_files import find_model
from penstock.api.ranks.identity import identify, require_credentials
from penstock.api.ranks.share import MESH_TIMEOUT_S, cut_cache, cut_share, find_part
from penstock.config import EngineConfig, Resolved
from penstock.errors import InvalidConfig, PenstockError, RankLost
from penstock.host.machine import free_memory_bytes, hold_few_heaps, settle_collector
from penstock.host.parent import ORPHANED, die_with_parent, read_first_line, watch_parent
from penstock.models.decoder import Decoder
from penstock.models.files import Checkpoint, open_checkpoint, read_config
from penstock.models.spec import spec_from_config
from penstock.ops import cpu
from penstock.parallel import Mesh, Segment, open_mesh
from penstock.passes.lora_table import LoraTable
from penstock.runner.cpu.runner import Runner
from penstock.runner.loras import LoraBank
from penstock.runner.ranks.backends.task import REFUSED, RankTask, decode_task
from penstock.runner.ranks.flow import HiddenReceiver, HiddenSender
from penstock.runner.ranks.follower import Follower, RankHeartbeat, is_later
from penstock.runner.ranks.group import HEARTBEAT_S
from penstock.runner.ranks.link import Credentials, LinkClosed, Listener, RankLink, connect
from penstock.runner.ranks.messages import (
    Hello,
    HiddenHello,
    RankFailed,
    RankRefused,
    Setup,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from penstock.runner.store.open import open_store


def main() -> int:
    die_with_parent()
    hold_few_heaps()
    line = read_first_line()
    if not line.endswith(b"\n"):
        return ORPHANED
    task = decode_task(line)
    watch_parent()
    config = EngineConfig(**task.options)  # as rank 0 has read them
    try:
        credentials = task.credentials or require_credentials(config)
        link = connect((task.host, task.port), credentials, task.wait_s)
    except PenstockError as error:
        print(f"error: rank {task.rank}: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, InvalidConfig) else ORPHANED
    try:
        return _work(task, config, credentials, link)
    except LinkClosed:
        return ORPHANED  # rank 0 is gone, or told to be
    except Exception as error:
        if not isinstance(error, PenstockError):
            traceback.print_exc()
        text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        with suppress(LinkClosed):  # rank 0 has noticed
            link.send(encode(RankFailed(text, error.rank if isinstance(error, RankLost) else -1)))
        return 1
    finally:
        link.close()


def _work(task: RankTask, config: EngineConfig, credentials: Credentials, link: RankLink) -> int:
    gc.disable()
    cpu.set_num_threads(task.threads)
    path = find_model(task.model, config.revision, progress=False)
    checkpoint = None if config.load_format == "dummy" and path.is_dir() else open_checkpoint(path)
    try:
        described = checkpoint.config if checkpoint else read_config(path)
        listener = Listener(link.host, 0, credentials)
        free_bytes, cores = free_memory_bytes(), cpu.available_cores()
        identity = identify(config, described, checkpoint)
        node, segment = os.uname().nodename, _make_segment(task)
        place = segment.address if segment else ""
        hello = Hello(task.rank, identity, link.host, node, os.getpid(), listener.port, cores, free_bytes, place)
        link.send(encode(hello))
        setup = decode_to_rank(link.receive(task.wait_s))
        if isinstance(setup, RankRefused):
            print(f"error: {setup.error}", file=sys.stderr)
            return REFUSED
        assert isinstance(setup, Setup)
        heartbeat = RankHeartbeat(link)
        heartbeat.start()
        layout = task.layout
        mesh = open_mesh(
            "shm", layout.shard(task.rank), layout.num_shards, segment or setup.segment, timeout_s=MESH_TIMEOUT_S
        )
        runner = _load(task.rank, setup, described, checkpoint, mesh, path)
    finally:
        if checkpoint:
            checkpoint.close()
    onward = None if setup.next_address is None else connect(setup.next_address, credentials, task.wait_s)
    follower = _join(task, runner, listener, onward, link, heartbeat)
    settle_collector()
    gc.enable()
    follower.serve()
    return 0


def _make_segment(task: RankTask) -> Segment | None:
    """Make the memory in which those that share its layers meet, if it is their first."""
    layout = task.layout
    return Segment(layout.num_shards) if layout.num_shards > 1 and layout.shard(task.rank) == 0 else None


def _load(
    rank: int, setup: Setup, described: Mapping[str, Any], checkpoint: Checkpoint | None, mesh: Mesh, path: Path
) -> Runner:
    """Load this rank's share, with room for its part of the cache, and open its part of the store."""
    settings = Resolved(**setup.settings, settings=())
    spec = keep_layers(spec_from_config(described, settings.max_model_len), settings)
    share = cut_share(spec, settings, rank)
    loras = LoraTable(share, settings.max_loras) if settings.enable_lora else None
    device = torch.device("cpu")
    model = load_weights(checkpoint, share, settings, device, loras=loras, mesh=mesh)
    assert isinstance(model, Decoder)
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
    own = cut_cache(grouping, share, settings.kv_cache_dtype, settings.block_size)
    memory = make_memory(setup.num_blocks, own, settings, device)
    bank = None if loras is None else LoraBank(loras, settings.max_lora_rank)
    opened = open_store(settings, path, spec, grouping, find_part(grouping, spec, settings, rank))
    return Runner(model, memory, loras=bank, store=opened[0] if opened else None)


def _join(
    task: RankTask,
    runner: Runner,
    listener: Listener,
    onward: RankLink | None,
    link: RankLink,
    heartbeat: RankHeartbeat,
) -> Follower:
    """Connect with the stages after and before."""
    receiver = sender = None
    if onward is not None:
        onward.send(encode(HiddenHello(task.rank)))
        sender = HiddenSender(onward, task.rank - task.layout.num_shards)
    if is_later(runner):
        upstream = task.rank + task.layout.num_shards
        receiver = HiddenReceiver(_await_upstream(listener, upstream), upstream)
    listener.close()
    return Follower(runner, link, heartbeat, receiver, sender, task.rank - task.layout.shard(task.rank))


def _await_upstream(listener: Listener, rank: int) -> RankLink:
    """Wait for the connection of the stage before."""
    while True:
        link = listener.accept(HEARTBEAT_S)
        if link is None:
            continue
        hello = decode_from_rank(link.receive(HEARTBEAT_S))
        if isinstance(hello, HiddenHello) and hello.rank == rank:
            return link
        link.close()


if __name__ == "__main__":
    sys.exit(main())
