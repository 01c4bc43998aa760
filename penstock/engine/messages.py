"""Messages between the API process and an engine process. Encoded with msgspec; nothing is ever unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engine.executor import Answer as Answer
from penstock.engine.executor import DropLora as DropLora
from penstock.engine.executor import EraseSession as EraseSession
from penstock.engine.executor import LoadLora as LoadLora
from penstock.engine.executor import SaveSession as SaveSession
from penstock.engine.journal import Mark as Mark
from penstock.engine.ranks import LastBeat as LastBeat
from penstock.engine.ranks import LostRank as LostRank
from penstock.engine.ranks import RankRecord as RankRecord
from penstock.engine.view import BlockView, RowView
from penstock.types import Applied, Delta, Request

HANDED_OVER = "handover"  # the end of a delta: another engine goes on


class BlockTransfer(msgspec.Struct, frozen=True):
    """An engine's part in handing prompts over between servers, which know the `secret`."""

    secret: str  # in hexadecimal
    host: str = ""
    port: int | None = None  # to serve blocks from; 0 takes a free one


class Add(msgspec.Struct, frozen=True, tag=True):
    """Begin a request. `outputs`: the open siblings and their tokens so far, where another engine began it."""

    request: Request
    outputs: dict[int, list[int]] | None = None
    mus: dict[int, float] | None = None  # of siblings: mirostat's mu after those tokens


class Abort(msgspec.Struct, frozen=True, tag=True):
    id: str
    sibling: int | None = None
    reason: str = "abort"


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop every cached prefix that no sequence uses now."""


class Control(msgspec.Struct, frozen=True, tag=True):
    """A message of `engine.executor` by its name and fields; `Answered` with the same id follows."""

    id: str
    name: str
    values: dict[str, Any] = {}


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask how rows and blocks are now; `Seen` follows. After the `last` nothing is kept for looks."""

    last: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class Found(msgspec.Struct, frozen=True, tag=True):
    """The model's files are open: a folder or a GGUF file's metadata to make its tokenizer from."""

    path: str
    folder: str | None = None
    metadata: dict[str, Any] | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Settings are (name, value, why)."""

    settings: list[tuple[str, Any, str]]
    generation_config: dict[str, Any]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    kv_cache_tokens: int
    max_num_seqs: int
    num_bytes: int  # of weights, as stored
    kv_cache_bytes: int
    is_encoder: bool
    quantization: str
    architecture: str
    load_s: float
    gpu_bytes: int = 0  # that the engine holds of a GPU's memory
    defaults: list[tuple[str, Any, str]] = []  # sampling values: (name, value, why)
    defaults_recommended: bool = False  # by the model's makers, or with its short name
    applied: list[Applied] = []  # to every request: the ledger's entries
    ranks: list[RankRecord] = []  # where there are several
    transfer_port: int | None = None  # that other servers fetch its blocks from
    start_s: dict[str, float] = {}  # by phase


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded; another try would end the same."""

    error: str


class Deltas(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The outputs of a step. The marks came before them."""

    deltas: list[Delta] = []
    marks: list[Mark] = []
    energy_j: dict[str, float] = {}  # by request, since the last time


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never be served."""

    id: str
    error: str


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The executor's answer to a `Control`."""

    id: str
    answer: Answer


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Look`."""

    stats: dict[str, float]
    rows: list[RowView]
    num_waiting: int
    blocks: BlockView


STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper ends of counts


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process is alive; `step_s` is the age of the step under way, 0 between steps."""

    step_s: float
    stats: dict[str, float]
    ranks: list[LastBeat] = []  # where there are several


Command = Add | Abort | Forget | Control | Look | Stop
Report = Found | Ready | Failed | Deltas | Refused | Answered | Seen | Beat | LostRank
