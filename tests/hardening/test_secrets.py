"""Keys: where they are read, how they are written, and what those who have one are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.cli import main
from penstock.commands.ps import loopback_url
from penstock.errors import InvalidConfig
from penstock.server.config import ServerConfig
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.http.keys import KeyRing, make_ring, read_admin_key, read_keys, reload_keys
from tests.server.running import RunningServer

DUMMY = ("--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEYS", raising=False)
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY", raising=False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"# secret\n",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf# a\r\n",
        b" \t\r\n\r",
        b"\xff\xfes\x00e\x00",
        b"\0\0",
        b"a\0b",
        b"a b c d",
        b"a b 0",
        b"\xe4",
    ],
)
def test_files_without_a_usable_key_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(InvalidConfig, match="keys"):
        read_keys([], str(tmp_path / "keys"))
    if b" " not in content and b"#" not in content:
        with pytest.raises(InvalidConfig):
            read_admin_key(None, str(tmp_path / "keys"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero", "/dev/null"):
        with pytest.raises(InvalidConfig):
            read_keys([], str(path))


def test_a_server_does_not_start_open(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# later\n")
    for arguments, env in (
        (["--api-key-file", str(tmp_path / "keys")], {}),
        ([], {"PENSTOCK_API_KEYS": ""}),
        ([], {"PENSTOCK_ADMIN_KEY": " "}),
        (["--admin-key-file", str(tmp_path / "none")], {}),
        (["--api-key", ""], {}),
        (["--allowed-hosts", "http://a"], {}),
        (["--allowed-origins", "a"], {}),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "penstock", "serve", str(tiny_model), "--port", "0", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            timeout=120,
        )
        assert ran.returncode == 1 and "listening" not in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr


def test_how_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes("\ufeffsecret alice 2.5\r\n\r\n# one\r\nschlüssel\r\nключ bob\r".encode())
    ring = KeyRing(read_keys([], str(tmp_path / "keys")))
    assert [key.name for key in read_keys([], str(tmp_path / "keys"))][::2] == ["alice", "bob"]
    right = ("secret", b"secret", "schlüssel", "schlüssel".encode(), "schlüssel".encode("latin-1"), "ключ".encode())
    wrong = (None, b"", "secret\r", "\ufeffsecret", b"schl?ssel", "schlussel", b"????", "????", "2.5", "alice")
    assert all(ring.identify(given) is not None for given in right)
    assert all(ring.identify(given) is None for given in wrong)


def test_keys_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS", "one alice 2,two")
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "root")
    ring = make_ring(ServerConfig(api_key=("three",)))
    names = [ring.identify(secret) for secret in ("one", "two", "three")]
    assert all(client is not None and not client.is_admin for client in names)
    admin = ring.identify("root")
    assert admin is not None and admin.is_admin and ring.weights()["alice"] == 2.0
    (tmp_path / "admin").write_bytes(b"\xef\xbb\xbfchief\r\n")
    ring = make_ring(ServerConfig(admin_key_file=str(tmp_path / "admin")))
    chief = ring.identify("chief")
    assert chief is not None and chief.is_admin and ring.identify("root") is None
    with pytest.raises(InvalidConfig, match="same API key"):
        read_keys([], None, "one a\none b")


def test_reloading(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old alice 2\n")
    config = ServerConfig(api_key_file=str(path))
    ring = make_ring(config)
    admission = AdmissionQueue(8, 1000, ring.weights())
    for bad in ("", "# none\n", "a b c d\n"):
        path.write_text(bad)
        with pytest.raises(InvalidConfig):
            reload_keys(ring, config)
        assert ring.identify("old") is not None
    path.write_text("new alice 3\nother bob\n")
    reload_keys(ring, config)
    assert ring.identify("old") is None and ring.identify("new") is not None
    assert dict(admission.fair_shares.weights) == {"alice": 3.0, "bob": 1.0}


@pytest.mark.slow
def test_ps_asks_where_it_is_the_admin(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loopback_url("http://[::]:80") == "http://[::1]:80"
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for arguments, key in (((), ""), (("--admin-key", "schlüssel"), "schlüssel"), (("--admin-key", "ключ"), "ключ")):
        with RunningServer(str(tiny_model), *DUMMY, "--host", "0.0.0.0", *arguments):
            assert main(["ps", "--json", "--api-key", key]) == 0
            assert json.loads(capsys.readouterr().out)[0]["requests"] == []


@pytest.fixture(scope="module")
def tenants(tiny_model: Path) -> Iterator[RunningServer]:
    env = {"PENSTOCK_API_KEYS": "one,schlüssel two", "PENSTOCK_ADMIN_KEY": "root"}
    with RunningServer(str(tiny_model), *DUMMY, env=env) as running:
        yield running


def test_keys_beyond_ascii_by_every_client(tenants: RunningServer) -> None:
    for key in ("schlüssel".encode(), "schlüssel".encode("latin-1")):
        for headers in ({b"x-api-key": key}, {b"authorization": b"Bearer  " + key}):
            assert httpx.get(tenants.url + "/v1/models", headers=headers).status_code == 200
    assert httpx.get(tenants.url + "/v1/models", headers={b"x-api-key": b"schl\xff"}).status_code == 401


def test_what_tenants_are_told(tenants: RunningServer, tiny_model: Path) -> None:
    admin, tenant = {"x-api-key": "root"}, {"x-api-key": "one"}
    told = httpx.get(tenants.url + "/info", headers=tenant).json()
    assert set(told) == {"version", "models"}
    assert set(told["models"][0]) == {"name", "loaded", "architecture", "quantization", "max_model_len"}
    known = httpx.get(tenants.url + "/info", headers=admin).json()
    assert known["models"][0]["pid"] > 0 and known["models"][0]["path"] == str(tiny_model)
    page = httpx.get(tenants.url + "/metrics", headers=tenant)
    assert page.status_code == 403 and "penstock:" not in page.text and "admin key" in page.text
    assert "penstock:num_requests_running" in httpx.get(tenants.url + "/metrics", headers=admin).text
    for path in ("/v1/models", "/v1/models/tiny", "/api/tags", "/api/ps", "/info", "/openapi.json", "/docs"):
        assert str(tiny_model) not in httpx.get(tenants.url + path, headers=tenant).text, path
    shown = httpx.post(tenants.url + "/api/show", headers=tenant, json={"model": "tiny"})
    assert shown.status_code == 200 and str(tiny_model) not in shown.text
    assert str(tiny_model) in httpx.get(tenants.url + "/v1/models", headers=admin).text


def test_without_keys_others_are_told_as_little(tiny_model: Path) -> None:
    with RunningServer(str(tiny_model), *DUMMY) as running:
        assert running.engine_pid() > 0  # on this machine everything
        told = httpx.get(running.url + "/info", headers={"X-Forwarded-For": "10.0.0.9"}).json()
        assert set(told) == {"version", "models"} and "pid" not in told["models"][0]
        assert httpx.get(running.url + "/metrics", headers={"X-Forwarded-For": "10.0.0.9"}).status_code == 200
    with RunningServer(str(tiny_model), *DUMMY, "--api-key", "one") as running:
        running.wait_for("no admin key is set", 5)
        for path in ("/admin/running", "/metrics"):
            assert httpx.get(running.url + path, headers={"x-api-key": "one"}).status_code == 403
