"""The page's files over HTTP: who gets them, how they are confined, and that they are all of one piece."""

from __future__ import annotations

import re

import httpx
import pytest

from penstock.server.page.accept import wants_page
from penstock.server.page.routes import POLICY, STATIC, list_files
from tests.server.running import RunningServer

ACCEPTED = {b"text/html": True, b"text/*": False, b"a/b, text/html ; q=0.1": True, b"text/html;q=0.000": False}
PATHS = ["../routes.py", "..%2froutes.py", "%2e%2e/routes.py", "/etc/passwd", "%2fetc%2fpasswd", "", ".", "app.js%00"]
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|setAttribute\(\"(style|on)"
)


def test_root_is_the_page_for_browsers_alone(keeping: RunningServer) -> None:
    page = httpx.get(keeping.url, headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (STATIC / "index.html").read_text() and page.headers["vary"] == "Accept"
    head = httpx.head(keeping.url, headers=BROWSER)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])
    for accept in ("*/*", "application/json", "text/html;q=0", ""):
        assert httpx.get(keeping.url, headers={"Accept": accept}).status_code == 401
        probe = httpx.get(keeping.url, headers={"Accept": accept, "x-api-key": "one"})
        assert (probe.text, probe.headers["content-type"]) == ("Penstock is running", "text/plain; charset=utf-8")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    assert httpx.post(keeping.url, json=body, headers=BROWSER).status_code == 401  # TGI's route needs the key
    assert "generated_text" in httpx.post(keeping.url, json=body, headers={**BROWSER, "x-api-key": "one"}).text


@pytest.mark.parametrize("name", sorted(list_files()))
def test_file_is_open_typed_and_confined(keeping: RunningServer, name: str) -> None:
    answer = httpx.get(f"{keeping.url}/page/{name}")
    assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    kind = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].partition(";")[0] == kind[name.rpartition(".")[2]]
    again = httpx.get(f"{keeping.url}/page/{name}", headers={"If-None-Match": f'"x", W/{answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "../routes.py",
        "..%2froutes.py",
        "%2e%2e/routes.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "",
        ".",
        "views",
        "app.js%00",
    ],
)
def test_nothing_else_is_read(keeping: RunningServer, path: str) -> None:
    request = httpx.Request("GET", keeping.url)
    with httpx.Client() as client:
        request.url = request.url.copy_with(raw_path=f"/page/{path}".encode())
        answer = client.send(request)
    assert answer.status_code in (401, 404) and "def " not in answer.text


def test_other_sites_cannot_embed_it(keeping: RunningServer) -> None:
    for site in ("cross-site", "same-site"):
        asked = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
        assert httpx.get(f"{keeping.url}/page/app.js", headers=asked).status_code == 403


@pytest.mark.parametrize(("accept", "wanted"), ACCEPTED.items())
def test_browsers_are_told_by_what_they_accept(accept: bytes, wanted: bool) -> None:
    for method in ("GET", "HEAD"):
        assert wants_page({"method": method, "headers": [(b"accept", accept)]}) is wanted
    assert not wants_page({"method": "POST", "headers": [(b"accept", accept)]})


def test_files_are_of_one_piece() -> None:
    """No inline code, no markup from text, nothing from elsewhere, and every file that is named exists."""
    files = list_files()
    index = files["index.html"].read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", index)
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', index))
    for name, path in files.items():
        text = path.read_text()
        if path.suffix == ".js":
            assert not FORBIDDEN.search(text), name
            assert len(text.splitlines()) <= 400, f"{name} has over 400 lines: split it along a noun"
            for target in re.findall(r'(?:from|import\() ?"([^"]+)"', text):
                assert target.startswith("."), f"{name} imports {target}"
                found = (path.parent / target).resolve().relative_to(STATIC.resolve()).as_posix()
                named.add(found)
        if path.suffix == ".css":
            assert "url(" not in text and "@import" not in text, name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[\w-]+\.\w", text), f"{name} names another site"
    assert named | {"index.html"} == set(files)
