"""Who may call what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.app import DELETES, READS, WRITES
from penstock.server.http.keys import OPEN, KeyRing, is_for_admin, read_keys
from tests.server.running import RunningServer

ROUTES: dict[str, Sequence[tuple[Any, ...]]] = {"GET": READS, "POST": WRITES, "DELETE": DELETES}


@pytest.fixture
def closed(keeping: RunningServer) -> RunningServer:
    return keeping


@pytest.mark.parametrize("path", sorted({one[0] for table in ROUTES.values() for one in table}))
def test_every_route_is_closed_but_health_and_version(closed: RunningServer, path: str) -> None:
    asked = path.replace("{name:path}", "x")
    method = next(name for name, table in ROUTES.items() if any(path == one[0] for one in table))

    def ask(headers: dict[str, str]) -> int:
        with httpx.stream(method, closed.url + asked, headers=headers) as answer:  # the live view has no end
            return answer.status_code

    for key in (None, "wrong", "ONE", "one two"):
        status = ask({} if key is None else {"Authorization": f"Bearer {key}"})
        assert (status in (200, 503)) if path in OPEN else status == 401
    assert is_for_admin("/admin/new") and is_for_admin("/api/pull") and not is_for_admin("/v1/models")
    if is_for_admin(path):
        assert ask({"x-api-key": "one"}) == 403
        assert ask({"x-api-key": "root"}) in (200, 400)


def test_other_sites_pages_cannot_administer(closed: RunningServer) -> None:
    def status(origin: str) -> int:
        return httpx.post(
            f"{closed.url}/admin/reset_prefix_cache", headers={"x-api-key": "root", "Origin": origin}
        ).status_code

    assert status("https://evil.example") == 403
    assert status(closed.url) == 200


@pytest.mark.parametrize(
    "path", ["/nothing", "/health/../v1/models", "//v1/models", "/v1/models/", "/docs", "/openapi.json"]
)
def test_other_paths_are_closed_too(closed: RunningServer, path: str) -> None:
    assert httpx.get(closed.url + path).status_code == 401


def test_both_headers_work(closed: RunningServer) -> None:
    for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "two"}, {"authorization": "bearer one"}):
        assert httpx.get(f"{closed.url}/v1/models", headers=headers).status_code == 200


def test_tenants_share_no_prefix(closed: RunningServer) -> None:
    """Neither the count of cached tokens nor anything else tells that another tenant sent the same prompt."""
    body = {"prompt": list(range(20, 84)), "max_tokens": 1}

    def cached(key: str) -> int:
        answer = httpx.post(f"{closed.url}/v1/completions", json=body, headers={"x-api-key": key}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") == 48
    assert cached("two") == 0


def test_declared_prefixes_are_shared(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("You are a helpful assistant, and this is a long system prompt. " * 3)
    system = (tmp_path / "system.txt").read_text()
    with RunningServer(
        str(tiny_model),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--api-key",
        "one",
        "--api-key",
        "two",
        "--public-prefix",
        str(tmp_path / "system.txt"),
    ) as running:

        def usage(key: str, question: str) -> tuple[int, int]:
            body = {
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
                "max_tokens": 1,
            }
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers={"x-api-key": key}).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]

        secret = "my secret question, which is longer than a few blocks of the cache are, so that it fills some"
        assert usage("one", secret)[0] == 0
        own, total = usage("one", secret)
        shared, _ = usage("two", secret)
        assert 0 < shared < own < total  # of the system prompt everything whole, of the question nothing
        assert usage("two", secret)[0] == own


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret alice 2.5\nother\n\n")
    keys = read_keys([], str(path))
    assert [(key.secret, key.name, key.weight) for key in keys][0] == ("secret", "alice", 2.5)
    assert keys[1].name.startswith("key-") and "other" not in keys[1].name
    ring = KeyRing(keys)
    client = ring.identify("secret")
    assert client is not None and client.tenant == "alice" and not client.is_admin
    assert ring.identify("secre") is None and ring.identify(None) is None
    for bad in ("a b c d", "a b 0", "a b nan"):
        path.write_text(bad)
        with pytest.raises(InvalidConfig):
            read_keys([], str(path))
    with pytest.raises(InvalidConfig):
        read_keys([" "], None)
