"""A lane: a forked process that runs one job after another until its socket closes."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, NoReturn

import msgspec

from penstock.errors import InvalidModel, PenstockError
from penstock.host.parent import die_with_parent
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
    Fork,
    Ids,
    Job,
    Refusal,
    RenderChat,
    Reply,
    SpellIds,
    TextReply,
    Texts,
    Tried,
    Words,
    ids_of,
    pack_ids,
)
from penstock.sandbox.limits import KEPT_BYTES, data_bytes, limit_memory, limit_render_time, limit_time, step_back
from penstock.text.program import LocalProgram, TooManyTokens
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import GrammarFacts

if TYPE_CHECKING:
    from penstock.sampling.grammar.lexicon import Lexicon

STDERR = 2


def serve(program: LocalProgram, lexicon: Lexicon | None, sock: socket.socket, order: Fork) -> NoReturn:
    """Run jobs and never return: a forked process must not continue as its parent."""
    status = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not os.environ.get("PENSTOCK_DEBUG"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)  # libraries report out-of-memory there
        limit_memory(order.more_bytes)
        limit_time(order.cpu_s)
        step_back(order.niceness)
        program.guard = limit_render_time
        _work(program, lexicon, sock)
        status = 0
    finally:
        os._exit(status)


def _work(program: LocalProgram, lexicon: Lexicon | None, sock: socket.socket) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    begin = data_bytes("VmRSS:")
    while True:
        try:
            body, _ = frames.receive(sock)
        except frames.Closed:
            return
        reply = _reply(program, lexicon, decoder.decode(body))
        has_grown = data_bytes("VmRSS:") - begin > KEPT_BYTES
        sock.sendall(frames.pack(reply, last=has_grown))
        if has_grown:
            return


def _reply(program: LocalProgram, lexicon: Lexicon | None, job: Job) -> Reply:
    try:
        return run(program, lexicon, job)
    except TooManyTokens as error:
        return Refusal("too_long", "", error.at_least)
    except InvalidModel as error:
        return Refusal("model", str(error))
    except PenstockError as error:
        return Refusal("request", str(error))
    except MemoryError:
        return Refusal("request", "it exceeds the memory limit: send less, or something simpler")
    except RecursionError:
        return Refusal("request", "it is nested too deeply: send something simpler")
    except Exception as error:  # report any error to the client and go on
        return Refusal("request", f"it cannot be read ({type(error).__name__}): send something simpler")


def run(program: LocalProgram, lexicon: Lexicon | None, job: Job) -> Reply:
    match job:
        case EncodeText():
            return Ids(pack_ids(program.encode_upto(job.text, job.add_special_tokens, job.max_tokens)))
        case EncodeChat():
            ids, text = program.encode_chat(job.messages, job.values, job.max_tokens, job.parse_special, job.template)
            return Ids(pack_ids(ids), text)
        case RenderChat():
            return TextReply(program.render(job.messages, job.values))
        case EncodeInfill():
            return Ids(pack_ids(program.encode_infill(job.gap, job.room, job.add_special_tokens, job.max_tokens)))
        case EncodeWords():
            return Words(program.encode_words(job.words))
        case DecodeIds():
            return TextReply(program.decode(job.ids))
        case SpellIds():
            return Texts(program.spell(ids_of(job.ids), job.alone))
        case DescribeTokens():
            return Described(program.describe())
        case CompileGrammar():
            return Tried(_try_grammar(lexicon or _make_lexicon(program), job))


def _make_lexicon(program: LocalProgram) -> Lexicon:
    from penstock.sandbox.lexicon import make_lexicon

    return make_lexicon(Tokenizer.of(program))


def _try_grammar(lexicon: Lexicon, job: CompileGrammar) -> GrammarFacts:
    from penstock.sampling.grammar.try_compile import on_large_stack, try_grammar  # needs numpy, which text jobs do not

    return on_large_stack(lambda: try_grammar(lexicon, job.asked, job.max_tokens))
