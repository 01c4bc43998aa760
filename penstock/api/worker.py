"""The engine process: `python -m penstock.api.worker`, started by the API process and ending with it.

The first line of standard input says what to load; afterwards the pipe's end tells that the parent is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import EngineConfig
from penstock.engine.accounting import EnergyAccount
from penstock.engine.ipc import CommandLoop, Heartbeat, Wire
from penstock.engine.messages import BlockTransfer, Failed, Found, LostRank, Ready
from penstock.errors import InvalidRequest, PenstockError, RankLost
from penstock.host.energy import find_meter
from penstock.host.gpus import Sharers
from penstock.host.machine import hold_few_heaps
from penstock.host.parent import ORPHANED, die_with_parent, read_first_line, watch_parent
from penstock.types import Request

if TYPE_CHECKING:
    from penstock.sampling.grammar.compiler import GrammarCompiler

RANK_LOST = 4
_log = logging.getLogger(__name__)
TOKENIZER_KEYS = ("tokenizer.", "general.architecture")


class Task(msgspec.Struct, frozen=True):
    """The model and options of one engine process."""

    model: str
    options: dict[str, Any]
    endpoint: str
    beat_endpoint: str
    num_replicas: int = 1  # engines that share the machine
    transfer: BlockTransfer | None = None  # of cache blocks, between servers
    num_on_gpu: int = 1  # those that share its GPU

    @property
    def folder(self) -> Path | None:
        """The folder of the server's engines; None if the endpoint is no socket in one."""
        kind, _, path = self.endpoint.partition("://")
        return Path(path).parent if kind == "ipc" else None


def main() -> int:
    die_with_parent()
    hold_few_heaps()
    line = read_first_line()
    if not line.endswith(b"\n"):
        return ORPHANED
    task = msgspec.json.decode(line, type=Task)
    watch_parent()
    wire = Wire(task.endpoint)
    heartbeat = Heartbeat(task.beat_endpoint)
    heartbeat.start()  # while loading, too
    try:
        return _work(task, wire, heartbeat)
    except PenstockError as error:
        wire.send(Failed(str(error)))
        if isinstance(error, RankLost):
            heartbeat.end(LostRank(error.rank, str(error)))
        return 1
    finally:
        wire.close()


def _work(task: Task, wire: Wire, heartbeat: Heartbeat) -> int:
    gc.disable()
    begin = time.perf_counter()
    from penstock.api.assemble import assemble, bytes_per_token, gpu_uuid, held_gpu_bytes
    from penstock.api.engine.transfer import open_exchange
    from penstock.api.model_files import find_model
    from penstock.api.ranks.watch import watch_ranks

    imported = time.perf_counter()
    config = EngineConfig.from_options(**task.options)
    path = find_model(task.model, config.revision, progress=sys.stderr.isatty())
    if not config.skip_tokenizer_init:
        wire.send(_describe_model(path, config))
    sharers = Sharers(task.num_replicas, task.num_on_gpu)
    assembly = assemble(str(path), config, with_text=False, sharers=sharers)
    gc.freeze()
    gc.enable()
    engine, settings = assembly.engine, assembly.settings
    ranks = watch_ranks(engine.executor, heartbeat, partial(_end, heartbeat))
    exchange = None if task.transfer is None else open_exchange(engine, task.transfer)
    wire.send(
        Ready(
            [(one.name, one.value, one.why) for one in settings.settings],
            msgspec.to_builtins(assembly.generation_config),
            assembly.spec.vocab_size,
            assembly.spec.width,
            settings.max_model_len,
            settings.kv_cache_tokens,
            settings.max_num_seqs,
            assembly.num_bytes,
            settings.kv_cache_tokens * bytes_per_token(assembly.spec, settings, assembly.draft),
            assembly.spec.is_encoder,
            assembly.quantization,
            assembly.spec.architecture,
            time.perf_counter() - begin,
            held_gpu_bytes(settings.device),
            [(one.name, one.value, one.why) for one in assembly.defaults.settings],
            assembly.defaults.is_recommended,
            list(assembly.applied),
            ranks,
            None if exchange is None else exchange.port,
            {"imports": imported - begin, **assembly.watch.seconds},
        )
    )
    loop = CommandLoop(engine, wire, heartbeat, partial(_prepare, assembly.grammars))
    if exchange is not None and exchange.fetch is not None:
        loop.fetch_with(exchange.fetch)
    meter = find_meter(settings.device, gpu_uuid(settings.device), task.folder)
    if meter is not None:
        loop.account.energy = EnergyAccount(meter.read)
    heartbeat.tell(loop.stats)
    try:
        loop.serve()
    except RankLost as error:
        _end(heartbeat, error)
    engine.close()
    return 0


def _end(heartbeat: Heartbeat, lost: RankLost) -> None:
    """End this process at once, whatever it waits for: the API process starts another, and its ranks."""
    _log.error("%s", lost)
    heartbeat.end(LostRank(lost.rank, str(lost)))
    os._exit(RANK_LOST)


def _prepare(grammars: GrammarCompiler | None, request: Request) -> object:
    """Compile the request's grammar and reasoning markers. The grammar was tried before, so this takes no longer."""
    asked, block = request.sampling.structured_outputs, request.reasoning
    if grammars is None:
        raise InvalidRequest("structured_outputs and thinking_token_budget need a tokenizer: load the model with one")
    if block is not None:
        grammars.marker(block.begin), grammars.marker(block.end)
    return None if asked is None else grammars.compile(asked, request.max_tokens, request.grammar)


def _describe_model(path: Path, config: EngineConfig) -> Found:
    """Describe the model before its weights are loaded, so that the API process loads its tokenizer meanwhile."""
    from penstock.api.model_files import find_model
    from penstock.models.files import open_checkpoint

    source = find_model(config.tokenizer, None, progress=False) if config.tokenizer else path
    if source.is_dir():
        return Found(str(path), folder=str(source))
    checkpoint = open_checkpoint(source)
    try:
        metadata = checkpoint.tokenizer_source()
        if isinstance(metadata, Path):
            return Found(str(path), folder=str(metadata))
        return Found(
            str(path),
            metadata={key: _plain(value) for key, value in metadata.items() if key.startswith(TOKENIZER_KEYS)},
        )
    finally:
        checkpoint.close()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    sys.exit(main())
