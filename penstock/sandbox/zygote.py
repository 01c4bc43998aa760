"""The process that loads a tokenizer and forks lanes: `python -m penstock.sandbox.zygote SOCKET`.

It has one thread and only loads, forks and kills. A lane starts in milliseconds with everything loaded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import PenstockError
from penstock.host.parent import die_with_parent
from penstock.sandbox import frames
from penstock.sandbox.jobs import Control, Fork, Forked, Kill, Load, Loaded, Refusal
from penstock.sandbox.lane import serve
from penstock.sandbox.limits import LOAD_BYTES, LOAD_S, limit_memory, limit_time
from penstock.text.program import LocalProgram
from penstock.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.sampling.grammar.lexicon import Lexicon

REAP_S = 1.0


class Zygote:
    """Obeys commands on its control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._decoder = msgspec.msgpack.Decoder(Control)
        self._program: LocalProgram | None = None
        self._lexicon: Lexicon | None = None
        self._lanes: dict[int, int] = {}  # process ids by lane number

    def run(self) -> None:
        while True:
            self._reap()
            if self._lanes and not select.select([self._control], [], [], REAP_S)[0]:
                continue
            try:
                body, _ = frames.receive(self._control)
            except frames.Closed:
                return
            self._obey(self._decoder.decode(body))

    def _obey(self, command: Load | Fork | Kill) -> None:
        if isinstance(command, Load):
            self._control.sendall(frames.pack(self._load(command)))
        elif isinstance(command, Fork):
            self._fork(command)
        elif command.number in self._lanes:
            os.kill(self._lanes[command.number], signal.SIGKILL)

    def _load(self, command: Load) -> object:
        limit_memory(LOAD_BYTES)
        limit_time(LOAD_S)
        try:
            self._program = LocalProgram.load(
                command.folder or command.metadata or {}, command.origin, command.template
            )
            facts = Loaded(self._program.facts())
        except PenstockError as error:
            return Refusal("model", str(error))
        except MemoryError:
            return Refusal(
                "model",
                f"{command.origin}: the tokenizer needs more than {LOAD_BYTES >> 20} MiB to load; "
                "download the model again",
            )
        finally:
            limit_time(0.0)
        gc.collect()
        gc.freeze()
        return facts

    def _fork(self, command: Fork) -> None:
        assert self._program is not None
        if command.grammars and self._lexicon is None:
            self._lexicon = self._make_lexicon(self._program)
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            ours.close()
            self._control.close()
            serve(self._program, self._lexicon, theirs, command)
        theirs.close()
        if pid > 0:
            self._lanes[command.number] = pid
        self._control.sendall(frames.pack(Forked(command.number, max(0, pid))))
        socket.send_fds(self._control, [b"."], [ours.fileno()])
        ours.close()

    def _make_lexicon(self, program: LocalProgram) -> Lexicon | None:
        from penstock.sandbox.lexicon import make_lexicon

        try:
            lexicon = make_lexicon(Tokenizer.of(program))
            lexicon.load_tokenizer()  # once, before forking
        except PenstockError:
            return None  # the lane reports the reason
        gc.collect()
        gc.freeze()
        return lexicon

    def _reap(self) -> None:
        for number, pid in list(self._lanes.items()):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            del self._lanes[number]


def main() -> int:
    # A closed socket means that the caller is gone, unless it was stopped.
    if sys.argv[2] == "1":
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads: they do not survive a fork
    Zygote(socket.socket(fileno=int(sys.argv[1]))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
