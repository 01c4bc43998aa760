"""/v1/files: what is uploaded is there again, for its tenant alone, within bounds, after a restart too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.errors import InvalidConfig
from penstock.server.files import store as store_module
from penstock.server.files.routes import MAX_PARTS, Upload, make_page
from penstock.server.files.store import MAX_AGE_S, FileStore, data_folder
from penstock.server.http.errors import ApiError
from tests.hardening.counted import CountedServer
from tests.server.running import RunningServer

FORM = b"multipart/form-data; boundary=xyz"


def client(running: RunningServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


def test_a_file_comes_back_as_it_was(keeping: RunningServer) -> None:
    openai_client = client(keeping)
    content = b"\x00\xff line\r\n--xyz\r\n" * 20_000
    made = openai_client.files.create(file=("../../etc/pass\u00e9wd.jsonl", content), purpose="batch")
    assert made.bytes == len(content) and made.purpose == "batch" and made.filename.endswith("wd.jsonl")
    assert made.expires_at == made.created_at + MAX_AGE_S
    assert openai_client.files.content(made.id).content == content
    assert openai_client.files.retrieve(made.id).id == made.id
    assert openai_client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        openai_client.files.content(made.id)


def test_lists_come_in_pages(keeping: RunningServer) -> None:
    openai_client = client(keeping)
    ids = [
        openai_client.files.create(
            file=(f"{number}.jsonl", b"x"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600 + number},
        ).id
        for number in range(3)
    ]
    assert {file.id for file in openai_client.files.list(limit=2)} >= set(ids)  # the client asks for all pages
    assert [file.id for file in openai_client.files.list(purpose="batch_output")] == []
    one = openai_client.files.retrieve(ids[1])
    assert one.expires_at == one.created_at + 3601
    for wrong in ({"limit": "0"}, {"limit": "9" * 30}, {"order": "up"}, {"after": "file-none"}):
        assert httpx.get(f"{keeping.url}/v1/files", params=wrong, headers={"x-api-key": "one"}).status_code == 400
    for id in ids:
        openai_client.files.delete(id)


def test_pages_follow_each_other() -> None:
    told = []

    def tell(id: str) -> dict[str, str]:
        told.append(id)
        return {"id": id}

    def page(**asked: str) -> dict[str, Any]:
        return make_page("01234", tell, asked, 10, 10, id_of=str)

    assert [one["id"] for one in page(limit="2")["data"]] == ["4", "3"] == told  # nothing else is made ready
    last = page(limit="2", after="1", order="asc")
    assert [one["id"] for one in last["data"]] == ["2", "3"] and last["has_more"]
    assert not page(after="2", order="asc")["has_more"]


def test_tenants_see_their_own(keeping: RunningServer) -> None:
    made = client(keeping).files.create(file=("a.jsonl", b"secret"), purpose="batch")
    for other in ("two", "root"):
        stranger = client(keeping, other)
        assert made.id not in [file.id for file in stranger.files.list()]
        for ask in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
    client(keeping).files.delete(made.id)


@pytest.mark.parametrize(
    "files, data, status, word",
    [
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}, 400, "purpose"),
        ({"file": ("a", b"x")}, {}, 400, "purpose"),
        ({"file": ("a", b"")}, {"purpose": "batch"}, 400, "empty"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, 400, "part 'file'"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "1"}, 400, "3600"),
        ({"file": ("a", b"x" * (5 << 20))}, {"purpose": "batch"}, 413, "--max-files-mb"),  # half of 8 MiB
        ({"file": ("a", b"x" * (10 << 20))}, {"purpose": "batch"}, 413, "larger"),
    ],
)
def test_wrong_uploads_say_why(
    keeping: RunningServer, files: dict[str, object], data: dict[str, str], status: int, word: str
) -> None:
    answer = httpx.post(f"{keeping.url}/v1/files", files=files, data=data, headers={"x-api-key": "one"})  # type: ignore[arg-type]
    assert answer.status_code == status and word in answer.json()["error"]["message"]
    assert client(keeping).files.list().data == []


def test_a_body_that_is_no_form(keeping: RunningServer) -> None:
    def post(body: bytes, kind: str) -> int:
        return httpx.post(
            f"{keeping.url}/v1/files", content=body, headers={"x-api-key": "one", "content-type": kind}
        ).status_code

    assert post(b"{}", "application/json") == 415
    assert post(b"x" * 10_000, FORM.decode()) == 400
    assert post(part("file", b"x", "a"), FORM.decode()) == 400  # cut off


@pytest.mark.parametrize(
    "body, word",
    [
        (b"\r\n" * 10_000, "no part begins"),
        (part("f", b"x") * (MAX_PARTS + 1), "parts"),
        (part("purpose", b"x" * 5000), "bytes"),
        (part("file", b"x", "a") + part("file", b"y", "b"), "one file"),
        (b"--xyz\r\n" + b"A: b\r\n" * 9 + b"\r\n", "header count"),
        (b"--xyz\r\nA: " + b"b" * 5000 + b"\r\n\r\n", "header size"),
        (b"--xyz\r\nA: b\r\n\r\n", "no name"),
        (part("file", b"\r\n--xyzx" * 10_000, "a"), "boundary"),
    ],
)
def test_hostile_forms(tmp_path: Path, body: bytes, word: str) -> None:
    store = FileStore(tmp_path, 1 << 20)
    upload = Upload(store, "", FORM)
    with pytest.raises(ApiError, match=word) as caught:
        upload.feed(body)
    assert caught.value.status == 400
    upload.close()
    store.reserve("", 1 << 20)  # all room is free again
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_form_in_any_pieces(tmp_path: Path, size: int) -> None:
    store = FileStore(tmp_path, 1 << 20)
    upload = Upload(store, "", FORM)
    content = b"\r\n--xy \r\n-" * 200
    body = part("purpose", b"batch") + part("file", content, 'a\x1b"b') + b"--xyz--\r\n"
    for at in range(0, len(body), size):
        upload.feed(body[at : at + size])
    upload.finish()
    assert upload.fields == {"purpose": "batch"} and "\x1b" not in (upload.filename or "")
    assert store.path_of(upload.id).read_bytes() == content


def test_a_store_reads_back_what_is_whole(tmp_path: Path) -> None:
    now = [1000.0]

    def open_store() -> FileStore:
        store = FileStore(tmp_path, 100, clock=lambda: now[0], is_shared=lambda: True)
        store.load()
        return store

    store = open_store()
    first, second, third = (f"file-{letter * 24}" for letter in "abc")
    for id, lifetime_s in ((first, 10), (second, 20)):
        store.reserve("x", 20)
        store.path_of(id).write_bytes(b"y" * 20)
        store.add(store.make(id=id, tenant="x", filename="f", purpose="batch", num_bytes=20, lifetime_s=lifetime_s))
    for name in (f"{third}.data", f"{third}.part", f"{third}.json", "mine.json", "mine.data"):
        (tmp_path / name).write_bytes(b"{")
    store = open_store()
    assert [file.id for file in store.list_for("x")] == [first, second]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{first}.data",
        f"{first}.json",
        f"{second}.data",
        f"{second}.json",
        "mine.data",
        "mine.json",
    ]
    with pytest.raises(ApiError, match="no room"):
        store.reserve("x", 11)  # of 100 bytes a tenant has half
    store.pin(first)
    now[0] = 1015.0
    assert [file.id for file in store.list_for("x")] == [second]
    store.delete_expired()
    assert store.path_of(first).exists()  # a batch reads it
    with pytest.raises(ApiError, match="batch"):
        store.pin(second)
        store.delete(store.find("x", second))
    store.pin(first, -1)
    store.delete_expired()
    assert not store.path_of(first).exists()
    store.reserve("x", 30)


def test_only_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FILES", 2)
    store = FileStore(tmp_path, 100)
    for id in ("file-a", "file-b"):
        store.check_number("")
        store.add(store.make(id=id, tenant="", filename="f", purpose="batch", num_bytes=0))
    with pytest.raises(ApiError, match="limits are 2"):
        store.check_number("")


def test_one_server_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    with data_folder(str(tmp_path / "mine"), 8000, tmp_path) as folder:
        assert folder == tmp_path / "mine" and all(part.stat().st_mode & 0o077 == 0 for part in folder.iterdir())
        with pytest.raises(InvalidConfig, match="another server"), data_folder(str(folder), 8000, tmp_path):
            pass
    with data_folder(None, 8000, tmp_path) as folder:
        assert folder == tmp_path / "home" / "data" / "8000"
        with data_folder(None, 8000, tmp_path / "other") as second:
            assert second == tmp_path / "other" / "data"
    assert not folder.exists()  # nothing was in it
    with data_folder(None, 0, tmp_path) as folder:
        assert folder == tmp_path / "data"
    with pytest.raises(InvalidConfig, match="--data-folder"), data_folder("/proc/none", 8000, tmp_path):
        pass


@pytest.mark.slow
def test_large_files_take_no_memory_and_hold_nobody_up(tiny_model: Path, tmp_path: Path) -> None:
    content = b"a line of some length, as they are in files\n" * (3 << 20)  # 132 MB
    with CountedServer(
        tmp_path / "report",
        str(tiny_model),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--data-folder",
        str(tmp_path / "data"),
    ) as running:
        ours = client(running)
        ours.files.create(file=("a", b"x"), purpose="batch")
        running.forget()
        running.forget_peak()
        before = running.rss_bytes()
        made = ours.files.create(file=("a", content), purpose="batch")
        assert ours.files.content(made.id).content == content
        assert ours.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h").id
        assert running.rss_bytes(peak=True) - before < 32 << 20
        running.check_callbacks()
