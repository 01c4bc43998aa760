"""The caller's end of a zygote: start it, load a tokenizer, fork lanes, restart it if it dies."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from os import PathLike
from typing import Any

import msgspec

from penstock.errors import InvalidModel, PenstockError
from penstock.host.machine import python_command
from penstock.sandbox import frames
from penstock.sandbox.jobs import Control, Fork, Forked, Kill, Load, Loaded, Refusal
from penstock.sandbox.limits import LOAD_S
from penstock.text.tokenizers.decoding import TokenizerInfo

LOAD_PATIENCE = 3  # wall time per CPU time, for a busy machine
FORK_S, FIRST_GRAMMAR_S = 10.0, 60.0
COMMAND = python_command("penstock.sandbox.zygote")
_numbers = itertools.count(1)


class SandboxFailed(PenstockError):
    """A sandboxed process ended, or did not answer in time."""


class Sandbox:
    """One model's zygote. Thread-safe; every call may block."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held from a request to its reply
        self._sending = threading.Lock()  # held over one message
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._load: Load | None = None
        self._closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            # PDEATHSIG follows the starting thread, so only the main thread sets it
            dies_too = threading.current_thread() is threading.main_thread()
            command = [*COMMAND, str(theirs.fileno()), str(int(dies_too))]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxFailed(f"no process can be started for the tokenizer: {error.strerror}") from None
        finally:
            theirs.close()
        self._control = ours

    def load(
        self, source: str | PathLike[str] | Mapping[str, Any], origin: str = "GGUF file", template: str | None = None
    ) -> TokenizerInfo:
        """Load a tokenizer from a folder or a GGUF file's metadata; `template` replaces its chat templates. Raises
        InvalidModel if it is damaged or exceeds the limits."""
        if isinstance(source, Mapping):
            self._load = Load(
                origin,
                metadata={
                    key: _plain(value)
                    for key, value in source.items()
                    if key.startswith(("tokenizer.", "general.architecture"))
                },
                template=template,
            )
        else:
            self._load = Load(origin, folder=os.fspath(source), template=template)
        with self._lock:
            return self._await_load()

    def _await_load(self) -> TokenizerInfo:
        assert self._load is not None
        try:
            reply = self._ask(self._load, LOAD_PATIENCE * LOAD_S, Loaded | Refusal)
        except TimeoutError:
            self._end()
            raise InvalidModel(
                f"{self._load.origin}: the tokenizer did not load within {LOAD_S:g} s; download the model again"
            ) from None
        except OSError:
            status = self._end()
            raise InvalidModel(
                f"{self._load.origin}: the process that loaded the tokenizer ended ({_how(status)}): it "
                "takes too much memory or is damaged; download the model again"
            ) from None
        if isinstance(reply, Refusal):
            raise InvalidModel(reply.message)
        assert isinstance(reply, Loaded)
        return reply.facts

    def fork(
        self, more_bytes: int, niceness: int = 0, cpu_s: float | None = None, grammars: bool = False
    ) -> tuple[int, socket.socket]:
        """Fork a lane; return its number and socket. A dead zygote is restarted first."""
        with self._lock:
            for is_last in (False, True):
                try:
                    self._revive()
                    return self._request_fork(Fork(next(_numbers), more_bytes, niceness, cpu_s, grammars))
                except OSError:
                    self._end()
                    if is_last or self._closed:
                        raise SandboxFailed("the process that encodes texts cannot be started") from None
        raise AssertionError

    def _request_fork(self, order: Fork) -> tuple[int, socket.socket]:
        assert self._control is not None
        reply = self._ask(order, FIRST_GRAMMAR_S if order.grammars else FORK_S, Forked)
        assert isinstance(reply, Forked)
        _, handles, _, _ = socket.recv_fds(self._control, 1, 1)
        if not handles:
            raise frames.Closed("the zygote ended")
        sock = socket.socket(fileno=handles[0])
        if not reply.pid:
            sock.close()
            raise OSError("no process could be forked")
        return order.number, sock

    def kill(self, number: int) -> None:
        """End a lane without waiting."""
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError), self._sending:
                control.sendall(frames.pack(Kill(number)))

    @property
    def is_foreign(self) -> bool:
        """True in a process forked from the zygote's owner."""
        return os.getpid() != self._owner

    def adopt(self) -> None:
        """Start over in a forked process, leaving the parent's zygote alone."""
        self._lock, self._sending, self._owner = threading.RLock(), threading.Lock(), os.getpid()
        self._process = self._control = None

    def _revive(self) -> None:
        if self._closed:
            raise SandboxFailed("the tokenizer has been closed")
        if self._process is None or self._process.poll() is not None or self._control is None:
            self._end()
            self._start()
            if self._load is not None:
                self._await_load()

    def _ask(self, command: Control, within_s: float, kind: Any) -> Any:
        assert self._control is not None
        end = time.monotonic() + within_s
        self._control.settimeout(within_s)
        with self._sending:
            self._control.sendall(frames.pack(command))
        self._control.settimeout(max(0.001, end - time.monotonic()))
        body, _ = frames.receive(self._control)
        return msgspec.msgpack.decode(body, type=kind)

    def _end(self) -> int | None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)  # if it is ending by itself, its status tells why
        process.kill()
        process.wait()
        return None

    def rest(self) -> None:
        """End the process and its lanes; the next call restarts them."""
        if self.is_foreign:
            self.adopt()
        self._kill()  # another thread may hold the lock while it waits for a reply
        with self._lock:
            self._kill()
            self._end()

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and its lanes for good; idempotent."""
        self._closed = True
        self.rest()


def _how(status: int | None) -> str:
    if status is None:
        return "stopped"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
