"""Small wheels on disk, and package indexes and hubs on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


def write_wheel(
    folder: Path,
    package: str,
    files: dict[str, bytes],
    version: str = "1.0",
    *,
    requires: tuple[str, ...] = (),
    forged: tuple[str, ...] = (),
    unlisted: tuple[str, ...] = (),
) -> Path:
    """A wheel whose RECORD holds, except for the `forged` files (wrong sha256) and the `unlisted` ones (no line)."""
    stem = f"{package.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    members = dict(files)
    members[f"{stem}.dist-info/METADATA"] = metadata.encode()
    members[f"{stem}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = []
    for name, data in members.items():
        digest = hashlib.sha256(b"forged" if name in forged else data).digest()
        encoded = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if name not in unlisted:
            lines.append(f"{name},sha256={encoded},{len(data)}")
    lines.append(f"{stem}.dist-info/RECORD,,")
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{stem}.dist-info/RECORD", "\n".join(lines) + "\n")
    return path


@pytest.fixture
def make_wheel() -> Callable[..., Path]:
    return write_wheel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, and pip told to look nowhere else."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return folder


class Index:
    """A package index that can hold back the second half of a wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_downloads = 0
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.cut = False
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = request.path.strip("/").split("/")
        if parts[0] == "simple":
            names = [wheel.name for wheel in self.folder.glob(f"{parts[1].replace('-', '_')}-*.whl")]
            page = "".join(f'<a href="/files/{name}">{name}</a>' for name in names)
            send(request, f"<html><body>{page}</body></html>".encode(), "text/html")
            return
        self.num_downloads += 1
        data = (self.folder / parts[-1]).read_bytes()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2])
        request.wfile.flush()
        self.half_sent.set()
        if not self.cut:
            self.go_on.wait(60)
            request.wfile.write(data[len(data) // 2 :])


def send(
    request: BaseHTTPRequestHandler, body: bytes, kind: str, headers: dict[str, str] | None = None, status: int = 200
) -> None:
    request.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Responder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer(self)
            except BrokenPipeError:
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Responder)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def serve() -> Callable[..., object]:
    return serving


@pytest.fixture
def index(wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(wheelhouse)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with serving(index.answer) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        yield index
        index.go_on.set()


@pytest.fixture
def start_pull() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Fetch a model in a process of its own; `before` is Python run there first."""
    started = []

    def start(name: str, before: str = "") -> subprocess.Popen[str]:
        code = f"""
{before}
import sys
from penstock.errors import PenstockError
from penstock.hub import pull
try:
    print(pull({name!r}))
except PenstockError as error:
    print(f"{{type(error).__name__}}: {{error}}")
    sys.exit(1)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
