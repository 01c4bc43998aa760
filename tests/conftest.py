"""What holds for every test: no outside connections, no model hub, few threads, no deadlines."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch, used as the oracle: test workers run side by side

import pytest
from hypothesis import settings

from tests.ops.interpreter import hasten

settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")

pytest_plugins = ["tests.simulation.table"]

LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "", None)


def _is_local(address: Any) -> bool:
    return not isinstance(address, tuple) or address[0] in LOCAL or str(address[0]).startswith("127.")


@pytest.fixture(autouse=True, scope="session")
def no_outside_connections() -> Iterator[None]:
    """Refuse every connection and every name look-up beyond this machine, as if there were no network."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise OSError(f"a test tried to connect to {address}")
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        return connect_ex(self, address) if _is_local(address) else 101

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local((host,)):
            raise socket.gaierror(socket.EAI_NONAME, f"a test tried to look up {host!r}")
        return getaddrinfo(host, *args, **kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", guarded_connect)
    patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
    patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def hastened_interpreter() -> None:
    """Of Triton's kernels, where a collected test has loaded it."""
    hasten()


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job ignores Ctrl-C, and its children inherit that; some tests send one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
