"""Run a model's tokenizer and chat templates in a sandboxed process, for blocking callers."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

from penstock.errors import InvalidRequest
from penstock.sandbox import frames
from penstock.sandbox.jobs import (
    CompileGrammar,
    DecodeIds,
    Described,
    DescribeTokens,
    EncodeChat,
    EncodeInfill,
    EncodeText,
    EncodeWords,
    Ids,
    Job,
    RenderChat,
    TextReply,
    Tried,
    Words,
    ids_of,
    pack_job,
    unpack_reply,
)
from penstock.sandbox.limits import GRAMMAR_BYTES, TEXT_BYTES
from penstock.sandbox.process import Sandbox
from penstock.text.chat.template import Message, plain
from penstock.text.infill import Gap, Room
from penstock.text.tokenizers.decoding import TokenNames
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import GrammarFacts, StructuredOutputsParams

TEXT_S = 60.0
MANY_BYTES = 1 << 22
BYTES_PER_BYTE, S_PER_BYTE = 256, 1e-5  # cost of a long text in a tokenizer without words
GRAMMAR_S = 10  # CPU time
PATIENCE = 6  # wall time per CPU time, for a busy machine
Kind = TypeVar("Kind")


class SandboxedProgram:
    """One lane, used by one caller at a time. Any disturbance of a call, also Ctrl-C, only costs that lane."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._lock = threading.Lock()
        self._lane: tuple[int, socket.socket] | None = None
        weakref.finalize(self, sandbox.close)

    def encode_upto(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}")
        return ids_of(self._text(EncodeText(text, add_special_tokens, max_tokens), Ids).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any],
        max_tokens: int | None = None,
        parse_special: bool = False,
        template: str | None = None,
    ) -> tuple[list[int], str]:
        reply = self._text(EncodeChat(plain(messages), plain(values), max_tokens, parse_special, template), Ids)
        return ids_of(reply.ids), reply.text or ""

    def encode_infill(self, gap: Gap, room: Room | None, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        return ids_of(self._text(EncodeInfill(gap, room, add_special_tokens, max_tokens), Ids).ids)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return self._text(EncodeWords(list(words)), Words).words

    def render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        return self._text(RenderChat(plain(messages), plain(values)), TextReply).text

    def decode(self, ids: Sequence[int]) -> str:
        return self._text(DecodeIds(list(ids)), TextReply).text

    def describe(self) -> TokenNames:
        return self._text(DescribeTokens(), Described).tokens

    def try_grammar(self, params: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
        """Try a grammar in a lane of its own."""
        data = pack_job(CompileGrammar(params, max_tokens))
        self._stay_at_home()
        number, sock = self.sandbox.fork(GRAMMAR_BYTES, cpu_s=GRAMMAR_S, grammars=True)
        try:
            body, _ = _ask(sock, data, PATIENCE * GRAMMAR_S)
        except OSError as error:
            raise grammar_refusal(error) from None
        finally:
            sock.close()
            self.sandbox.kill(number)
        return unpack_reply(body, Tried).facts

    def _stay_at_home(self) -> None:
        """Drop the parent's lanes in a forked process: two cannot share a socket."""
        if self.sandbox.is_foreign:
            self._lock, self._lane = threading.Lock(), None
            self.sandbox.adopt()

    def rest(self) -> None:
        """End the processes; the next call restarts them."""
        self._stay_at_home()
        with self._lock:
            lane, self._lane = self._lane, None
        if lane is not None:
            lane[1].close()
        self.sandbox.rest()

    def _text(self, job: Job, kind: type[Kind]) -> Kind:
        data = pack_job(job)
        self._stay_at_home()
        with self._lock:
            lane, self._lane = self._lane, None
            try:
                body = None
                if lane is not None and len(data) <= MANY_BYTES:
                    with contextlib.suppress(ConnectionError):  # it may have died while idle
                        body = self._exchange(lane, data, TEXT_S)
                elif lane is not None:
                    self._drop(lane)
                if body is None:
                    # the caller's own text: a long one gets what it needs
                    more = max(0, len(data) - MANY_BYTES)
                    lane = self.sandbox.fork(TEXT_BYTES + more * BYTES_PER_BYTE)
                    body = self._exchange(lane, data, TEXT_S + more * S_PER_BYTE)
            except OSError as error:
                raise text_refusal(error) from None
        return unpack_reply(body, kind)

    def _exchange(self, lane: tuple[int, socket.socket], data: bytearray, within_s: float) -> bytes:
        """Run a job; keep the lane for the next one unless it ended or was disturbed."""
        ends = True
        try:
            body, ends = _ask(lane[1], data, within_s)
            return body
        finally:
            if ends:
                self._drop(lane)
            else:
                self._lane = lane

    def _drop(self, lane: tuple[int, socket.socket]) -> None:
        lane[1].close()
        with contextlib.suppress(OSError):
            self.sandbox.kill(lane[0])


def _ask(sock: socket.socket, data: bytearray, within_s: float) -> tuple[bytes, bool]:
    sock.settimeout(within_s)
    sock.sendall(data)
    return frames.receive(sock)


def text_refusal(error: BaseException, within_s: float = TEXT_S) -> InvalidRequest:
    if isinstance(error, TimeoutError):
        return InvalidRequest(
            f"the model's tokenizer or chat template did not finish within {within_s:g} s on this text: shorten it"
        )
    return InvalidRequest(
        f"the model's tokenizer or chat template needs more than {TEXT_BYTES >> 20} MiB for this text: shorten it"
    )


def grammar_refusal(error: BaseException) -> InvalidRequest:
    limit = f"{GRAMMAR_S} s" if isinstance(error, TimeoutError) else f"{GRAMMAR_S} s or {GRAMMAR_BYTES >> 20} MiB"
    return InvalidRequest(f"structured_outputs: the grammar was not compiled within {limit}: give a simpler one")


def load_sandboxed(
    source: str | PathLike[str] | Mapping[str, Any],
    origin: str = "GGUF file",
    sandbox: Sandbox | None = None,
    template: str | None = None,
) -> Tokenizer:
    """Load a tokenizer that runs in a process of its own; `template` replaces its chat templates."""
    sandbox = sandbox or Sandbox()
    try:
        facts = sandbox.load(source, origin, template)
    except BaseException:
        sandbox.close()
        raise
    return Tokenizer.from_info(facts, SandboxedProgram(sandbox), origin)
