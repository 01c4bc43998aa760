"""Web pages that reach for a server on this machine: by another name for it, or across sites."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.app import DELETES, READS, WRITES
from penstock.server.connections.hosts import Hosts, OriginCheck, is_local, read_origins, split_host
from penstock.server.http.keys import AuthMiddleware, KeyRing, is_for_admin, read_keys
from tests.llm import tiny
from tests.server.running import RunningServer

ROUTES = [
    (method, path.replace("{name:path}", "x").replace("{id}", "x"))
    for method, table in (("GET", READS), ("POST", WRITES), ("DELETE", DELETES))
    for path, *_ in table
]
DUMMY = ("--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny")
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def local(tiny_model: Path, home: Path) -> Iterator[RunningServer]:
    """As it is started by most: on this machine, without a key."""
    tiny.write_config(home / "models" / "second", vocab_size=320)
    with RunningServer(str(tiny_model), *DUMMY, "--model", "second", env={"PENSTOCK_HOME": str(home)}) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[RunningServer]:
    """With keys and names, for pages of two sites."""
    with RunningServer(
        str(tiny_model),
        *DUMMY,
        "--api-key",
        "one",
        "--admin-key",
        "root",
        "--allowed-hosts",
        "api.example",
        "--allowed-hosts",
        "*.pods.example",
        "--allowed-origins",
        "https://app.example/",
        "--allowed-origins",
        "null",
    ) as running:
        yield running


def raw(server: RunningServer, request: bytes) -> int:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(request)
        line.shutdown(socket.SHUT_WR)
        answer = line.recv(1 << 16)
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("method, path", ROUTES)
def test_another_name_for_this_server_is_refused(local: RunningServer, method: str, path: str) -> None:
    answer = httpx.request(method, local.url + path, headers={"Host": "evil.example"}, json=HI)
    assert answer.status_code == 403 and "--allowed-hosts" in answer.text
    other = httpx.request(method, local.url + path, headers={"Origin": EVIL}, json=HI)
    assert other.status_code == 403 and "--allowed-origins" in other.text
    assert "access-control-allow-origin" not in other.headers


def test_refusals_have_the_shape_of_their_api(local: RunningServer) -> None:
    def refused(path: str) -> Any:
        return httpx.post(local.url + path, headers={"Host": "evil.example"}, json=HI).json()

    assert refused("/v1/chat/completions")["error"]["type"] == "permission_error"
    assert refused("/v1/messages")["error"]["type"] == "permission_error"
    assert refused("/v1/messages")["type"] == "error"
    assert isinstance(refused("/api/chat")["error"], str)
    assert refused("/generate")["error_type"] == "validation"


@pytest.mark.parametrize(
    "head, answered",
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost", 200),
        (b"GET /v1/models HTTP/1.1\r\nhOsT:LOCALHOST.:99", 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: [::1]:8000", 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.2", 200),
        (b"GET /v1/models HTTP/1.0", 200),
        (b"GET /v1/models HTTP/1.0\r\nHost: evil.example", 403),
        (b"GET /v1/models HTTP/1.1", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost", 403),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET http://localhost:80/v1/models HTTP/1.1\r\nHost: localhost", 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost:8000@evil.example", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost.evil.example", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1.evil.example", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: 10.0.0.1", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: 0.0.0.0", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost:", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\xff", 403),
        (b"GET /health HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET /v1/models HTTP/1.1\r\nX-Forwarded-Host: localhost\r\nHost: evil.example", 403),
    ],
)
def test_names(local: RunningServer, head: bytes, answered: int) -> None:
    assert raw(local, head + b"\r\n\r\n") == answered


def test_which_names_there_are() -> None:
    def allows(hosts: Hosts, name: str) -> bool:
        found = split_host(name)
        return found is not None and hosts.allows(found[0])

    everywhere = Hosts("0.0.0.0", ["Api.Example:80", "*.pods.example"])
    for name in ("10.0.0.7:8000", "[fd00::1]", "api.example", "a.b.pods.example", socket.gethostname(), "localhost"):
        assert allows(everywhere, name), name
    for name in ("pods.example", "xpods.example", "evil.example", "2130706433", "0x7f.1", "localhost..", "[::1", "a b"):
        assert not allows(everywhere, name), name
    assert allows(Hosts("192.168.1.7"), "192.168.1.7") and not allows(Hosts("192.168.1.7"), "192.168.1.8")
    assert allows(Hosts("::"), "[2001:db8::1]:80") and allows(Hosts("127.0.0.1", ["*"]), "evil.example")
    for wrong in ("http://a", "", "a/b", "*a", "a.*", "a b"):
        with pytest.raises(InvalidConfig):
            Hosts("127.0.0.1", [wrong])


@pytest.mark.parametrize(
    "headers, answered",
    [
        ({}, 200),
        ({"Origin": "OWN"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "OWN", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "x"}, 403),
        ({"Origin": "OWN", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "OWN.evil.example"}, 403),
        ({"Origin": "ftp://localhost"}, 403),
        ({"Origin": "OWN, OWN"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
    ],
)
def test_sites(local: RunningServer, headers: dict[str, str], answered: int) -> None:
    sent = {name: value.replace("OWN", local.url) for name, value in headers.items()}
    for path, body in (
        ("/v1/chat/completions", HI),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
    ):
        assert httpx.post(local.url + path, json=body, headers=sent).status_code == answered


def test_a_link_to_here_may_be_followed(local: RunningServer) -> None:
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    page = httpx.get(local.url + "/docs", headers=visit)
    assert page.status_code == 200 and "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for changed in ({"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Mode": "no-cors"}, {"Origin": EVIL}):
        assert httpx.get(local.url + "/docs", headers={**visit, **changed}).status_code == 403


@pytest.mark.parametrize(
    "kind, answered",
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=a", 415),
        ("text/plain; application/json", 415),
        ("application/jsonp", 415),
        ("", 415),
        (None, 415),
    ],
)
def test_pages_must_send_json(local: RunningServer, kind: str | None, answered: int) -> None:
    content = b'{"prompt": "a", "max_tokens": 1}'
    headers = {} if kind is None else {"Content-Type": kind}
    for browser in ({"Origin": local.url}, {"Sec-Fetch-Site": "same-origin"}):
        answer = httpx.post(local.url + "/v1/completions", content=content, headers={**headers, **browser})
        assert answer.status_code == answered
    assert httpx.post(local.url + "/v1/completions", content=content, headers=headers).status_code == 200  # curl -d


def preflight(server: RunningServer, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.options(
        server.url + path,
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )


def test_allowed_pages(shared: RunningServer) -> None:
    for origin in ("https://app.example", "null"):
        asked = preflight(shared, origin)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        answer = httpx.post(shared.url + "/v1/chat/completions", json=HI, headers={**headers, "x-api-key": "one"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        assert httpx.post(shared.url + "/v1/chat/completions", json=HI, headers=headers).status_code == 401
    for origin in (EVIL, "http://app.example", "https://app.example:444", "https://app.example.evil.example"):
        refused = preflight(shared, origin)
        assert refused.status_code in (400, 403) and "access-control-allow-origin" not in refused.headers
        assert (
            httpx.post(
                shared.url + "/v1/chat/completions", json=HI, headers={"Origin": origin, "x-api-key": "one"}
            ).status_code
            == 403
        )


def test_allowed_names(shared: RunningServer) -> None:
    for host, answered in (
        ("api.example:443", 200),
        ("a.pods.example", 200),
        ("pods.example", 403),
        ("evil.example", 403),
    ):
        headers = {"Host": host, "x-api-key": "one"}
        assert httpx.get(shared.url + "/v1/models", headers=headers).status_code == answered
        headers = {"Host": host, "Origin": f"https://{host.removesuffix(':443')}", "x-api-key": "one"}
        assert httpx.get(shared.url + "/v1/models", headers=headers).status_code == answered


def test_any_page() -> None:
    check = OriginCheck(read_origins(["*"]))
    scope = {"method": "POST", "headers": [(b"host", b"a"), (b"origin", b"null"), (b"sec-fetch-site", b"cross-site")]}
    assert check(scope) is None
    for wrong in ("app.example", "https://", "https://a/b", "https://a b"):
        with pytest.raises(InvalidConfig):
            read_origins([wrong])


# the admin's


def asked(
    path: str,
    host: bytes | None = b"localhost",
    peer: str | None = "127.0.0.1",
    more: Sequence[tuple[bytes, bytes]] = (),
) -> dict[str, Any]:
    headers = [*([(b"host", host)] if host is not None else []), *more]
    return {
        "type": "http",
        "path": path,
        "method": "POST",
        "headers": headers,
        "client": None if peer is None else (peer, 1),
    }


@pytest.mark.parametrize(
    "scope, local",
    [
        (asked("/"), True),
        (asked("/", peer="::1"), True),
        (asked("/", peer="::ffff:127.0.0.1"), True),
        (asked("/", host=b"[::1]:80"), True),
        (asked("/", peer="10.0.0.1"), False),
        (asked("/", peer=None), False),
        (asked("/", host=None), False),
        (asked("/", host=b"api.example"), False),
        (asked("/", host=b"10.0.0.1"), False),
        (asked("/", more=[(b"x-forwarded-for", b"127.0.0.1")]), False),
        (asked("/", more=[(b"via", b"1.1 a")]), False),
        (asked("/", more=[(b"forwarded", b"for=1.2.3.4")]), False),
        (asked("/", more=[(b"host", b"evil")]), False),
    ],
)
def test_who_is_on_this_machine(scope: dict[str, Any], local: bool) -> None:
    assert is_local(scope) is local


METHODS = {one[0]: method for method, table in (("GET", READS), ("POST", WRITES), ("DELETE", DELETES)) for one in table}


@pytest.mark.parametrize("path", sorted(filter(is_for_admin, METHODS)))
def test_without_keys_only_this_machine_administers(local: RunningServer, path: str) -> None:
    method = METHODS[path]
    with httpx.stream(method, local.url + path) as answer:  # one of them never ends
        assert answer.status_code in (200, 400)
    forwarded = httpx.request(method, local.url + path, headers={"X-Forwarded-For": "10.0.0.9"})
    assert forwarded.status_code == 403 and "admin" in forwarded.text


def test_who_is_the_admin() -> None:
    open_ring, with_admin, with_keys = KeyRing(), KeyRing(admin="root"), KeyRing(read_keys(["one"], None))
    for ring, secret, here, admin in (
        (open_ring, None, True, True),
        (open_ring, None, False, False),
        (with_admin, None, True, False),
        (with_admin, "root", False, True),
        (with_keys, "one", True, False),
    ):
        client = ring.identify(secret, is_local=here)
        assert client is not None and client.is_admin is admin
    assert with_keys.identify(None, is_local=True) is None
    gate = AuthMiddleware(None, open_ring, [])  # type: ignore[arg-type]
    denied = gate._find_error(open_ring.identify(None), "/admin/running")
    assert denied is not None and denied.status == 403


def test_unloading_is_the_admins(local: RunningServer) -> None:
    body = {"model": "tiny", "keep_alive": 0}
    for path in ("/api/chat", "/api/generate"):
        refused = httpx.post(local.url + path, json=body, headers={"X-Forwarded-For": "10.0.0.9"})
        assert refused.status_code == 403 and isinstance(refused.json()["error"], str)
    said = httpx.post(
        local.url + "/api/generate",
        json={**body, "prompt": "a", "options": {"num_predict": 1}},
        headers={"X-Forwarded-For": "10.0.0.9"},
    )
    assert said.status_code == 200
    assert httpx.get(local.url + "/api/ps").json()["models"][0]["expires_at"].startswith("9999")


def test_files_are_deleted_only_where_that_is_allowed(local: RunningServer, home: Path) -> None:
    refused = httpx.request("DELETE", local.url + "/api/delete", json={"model": "second"})
    assert refused.status_code == 403 and "--allow-delete" in refused.json()["error"]
    assert (home / "models" / "second" / "config.json").exists()


def refused(allowed: Sequence[str], *headers: tuple[bytes, bytes], scheme: str = "http") -> bool:
    scope = {"method": "GET", "scheme": scheme, "server": ("127.0.0.1", 8000), "headers": list(headers)}
    return OriginCheck(read_origins(allowed))(scope) is not None


def test_default_ports_are_left_out() -> None:
    for given, sent in (
        ("https://app.example:443", b"https://app.example"),
        ("http://app.example:80/", b"http://app.example"),
        ("HTTPS://[::1]:443", b"https://[::1]"),
    ):
        assert not refused([given], (b"host", b"a"), (b"origin", sent))
    for given, sent in (
        ("https://app.example:80", b"https://app.example"),
        ("https://app.example:443", b"http://app.example"),
        ("https://app.example:8443", b"https://app.example"),
    ):
        assert refused([given], (b"host", b"a"), (b"origin", sent))


def test_pages_of_another_scheme_are_others() -> None:
    here, page = (b"host", b"localhost:8000"), (b"origin", b"https://localhost:8000")
    assert refused([], here, page) and not refused([], here, page, scheme="https")
    assert refused([], here, (b"origin", b"http://localhost:8000"), scheme="https")
    assert refused([], (b"host", b"192.168.1.7:8000"), (b"origin", b"https://192.168.1.7:8000"))
    assert not refused(["https://localhost:8000"], here, page)
    assert not refused([], here, page, (b"x-forwarded-proto", b"https"))
    assert not refused([], (b"host", b"api.example"), (b"origin", b"https://api.example"))  # TLS ends before


def test_models_with_a_slash(local: RunningServer) -> None:
    assert httpx.get(local.url + "/v1/models/").json() == httpx.get(local.url + "/v1/models").json()
    assert httpx.get(local.url + "/v1/models/none").status_code == 404


@pytest.mark.parametrize("coding, answered", [("gzip", 415), ("identity, br", 415), ("Identity", 200), ("", 200)])
def test_compressed_bodies_are_refused(local: RunningServer, coding: str, answered: int) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", HI),
        ("/v1/messages", {**HI, "model": "tiny"}),
        ("/api/show", {"model": "tiny"}),
    ):
        answer = httpx.post(local.url + path, json=body, headers={"Content-Encoding": coding})
        assert answer.status_code == answered, answer.text
        assert answered == 200 or "Content-Encoding" in answer.text
