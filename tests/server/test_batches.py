"""/v1/batches: every line is answered once, whatever ends the server in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.server.batches import batches as batches_module
from penstock.server.batches import job as job_module
from penstock.server.batches.batches import BatchBody, Batches
from penstock.server.batches.job import ConcurrencyLimit, check_lines
from penstock.server.batches.state import BatchState
from penstock.server.files.store import FileStore, new_file_id
from penstock.server.http.errors import ApiError

TEXTS: Literal["/v1/completions"] = "/v1/completions"
DAY_S = 86400


def line(custom_id: str, url: str = TEXTS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": custom_id}})


class Scripted:
    """Answers as it is told; knows what it was asked."""

    def __init__(self, answer: Callable[[str], Awaitable[tuple[int, bytes]]] | None = None) -> None:
        self.asked: list[str] = []
        self._answer = answer

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        prompt = json.loads(body)["prompt"]
        self.asked.append(prompt)
        return (200, b'{"ok":1}') if self._answer is None else await self._answer(prompt)


def answering(*prompts: str) -> Scripted:
    """Answers these, and no other ever."""

    async def answer(prompt: str) -> tuple[int, bytes]:
        if prompt not in prompts:
            await asyncio.Event().wait()
        return 200, b'{"ok":1}'

    return Scripted(answer)


class BatchFolder:
    """A folder of files and batches that servers open one after another, with a clock of its own."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.now_s = 1_000_000.0
        self._folder, self._max_bytes = folder, max_bytes
        for name in ("files", "batches"):
            (folder / name).mkdir()

    async def open(self, client: Scripted) -> Batches:
        files = FileStore(self._folder / "files", self._max_bytes, clock=lambda: self.now_s)
        made = Batches(self._folder / "batches", files, lambda tenant: client, 1 << 20, clock=lambda: self.now_s)
        await made.start()
        return made

    def read(self, batches: Batches, id: str | None) -> list[dict[str, Any]]:
        assert id is not None and batches.files.has(id)
        return [json.loads(one) for one in batches.files.path_of(id).read_text().splitlines()]


def add_input(batches: Batches, text: str, tenant: str = "") -> str:
    id = new_file_id()
    batches.files.path_of(id).write_text(text)
    batches.files.reserve(tenant, len(text))
    batches.files.add(batches.files.make(id=id, tenant=tenant, filename="in", purpose="batch", num_bytes=len(text)))
    return id


async def begin(batches: Batches, *entries: str, tenant: str = "", **more: Any) -> BatchState:
    file_id = add_input(batches, "\n".join(entries), tenant)
    body = BatchBody(input_file_id=file_id, endpoint=TEXTS, completion_window="24h", **more)
    return await batches.create(tenant, body)


async def wait_for(state: BatchState, *statuses: str) -> None:
    end = time.monotonic() + 10
    while state.status not in statuses:
        assert time.monotonic() < end, state
        await asyncio.sleep(0.005)


async def settle(batches: Batches) -> None:
    """Until no batch reads its input any more."""
    while batches.files._pins:
        await asyncio.sleep(0.005)


def test_a_batch_is_answered(tmp_path: Path) -> None:
    async def answer(prompt: str) -> tuple[int, bytes]:
        return (400, b'{"error":{}}') if prompt == "bad" else (200, b'{"ok":1}')

    async def main() -> None:
        place = BatchFolder(tmp_path)
        batches = await place.open(Scripted(answer))
        state = await begin(
            batches,
            line("a"),
            "",
            line("bad"),
            line("b"),
            metadata={"k": "v"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert state.as_json()["status"] == "validating" and state.as_json()["output_file_id"] is None
        await wait_for(state, "completed")
        told = state.as_json()
        assert told["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert told["metadata"] == {"k": "v"} and told["completed_at"] and told["in_progress_at"]
        output = place.read(batches, told["output_file_id"])
        assert sorted(one["custom_id"] for one in output) == ["a", "b"]
        assert output[0]["response"]["body"] == {"ok": 1}
        failed = place.read(batches, told["error_file_id"])
        assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("bad", 400)]
        file = batches.files.find("", told["output_file_id"])
        assert file.purpose == "batch_output" and file.expires_at - file.created_at == 3600
        await batches.close()

    asyncio.run(main())


def test_no_line_twice_and_none_lost(tmp_path: Path) -> None:
    """A server that is killed at any line is followed by one that goes on; a half-written line is asked again."""

    async def main() -> None:
        place = BatchFolder(tmp_path)
        entries = [line(str(number)) for number in range(20)]
        hanging = asyncio.Event()

        async def hang(prompt: str) -> tuple[int, bytes]:
            if int(prompt) >= 7:
                await hanging.wait()
            return 200, b'{"ok":1}'

        first = Scripted(hang)
        batches = await place.open(first)
        state = await begin(batches, *entries)
        await wait_for(state, "in_progress")
        while state.num_completed < 7:
            await asyncio.sleep(0.005)
        await batches.close()
        journal = next((tmp_path / "batches").glob("*.answers"))
        journal.write_bytes(journal.read_bytes()[:-10])  # as a kill in the middle of a write leaves it
        again = Scripted()
        batches = await place.open(again)
        resumed = batches.find("", state.id)
        await wait_for(resumed, "completed")
        output = place.read(batches, resumed.output_file_id)
        assert sorted(int(one["custom_id"]) for one in output) == list(range(20))
        assert len(again.asked) == 14 and resumed.as_json()["request_counts"]["completed"] == 20
        await settle(batches)
        await batches.close()
        batches = await place.open(Scripted())  # nothing is left to do
        assert batches.find("", state.id).as_json() == resumed.as_json()
        assert batches.files.has(str(resumed.output_file_id)) and not list((tmp_path / "batches").glob("*.answers"))
        await batches.close()

    asyncio.run(main())


@pytest.mark.parametrize("moved", [0, 1])
def test_a_kill_while_files_are_made(tmp_path: Path, moved: int) -> None:
    async def main() -> None:
        place = BatchFolder(tmp_path)
        batches = await place.open(Scripted())
        state = await begin(batches, line("a"), line("b"))
        await wait_for(state, "completed")
        await settle(batches)
        await batches.close()
        # back to the moment at which the files' ids had been written down
        record = tmp_path / "batches" / f"{state.id}.json"
        record.write_text(record.read_text().replace('"status":"completed"', '"status":"finalizing"'))
        data = batches.files.path_of(str(state.output_file_id))
        data.with_suffix(".json").unlink()
        if not moved:
            data.rename(tmp_path / "batches" / f"{state.id}.answers")
        batches = await place.open(Scripted())
        await wait_for(batches.find("", state.id), "completed")
        assert len(place.read(batches, state.output_file_id)) == 2
        await batches.close()

    asyncio.run(main())


def test_cancelled_keeps_what_was_answered(tmp_path: Path) -> None:
    async def main() -> None:
        place = BatchFolder(tmp_path)
        batches = await place.open(answering("a"))
        running = await begin(batches, line("a"), line("b"))
        while running.num_completed < 1:
            await asyncio.sleep(0.005)
        waiting = await begin(batches, line("c"))
        with pytest.raises(ApiError, match="cancel the batch"):
            batches.files.delete(batches.files.find("", running.input_file_id))
        for state in (waiting, running):
            await batches.cancel("", state.id)
            await wait_for(state, "cancelled")
        assert [one["custom_id"] for one in place.read(batches, running.output_file_id)] == ["a"]
        assert waiting.as_json()["output_file_id"] is None and waiting.as_json()["cancelling_at"]
        with pytest.raises(ApiError, match="has ended"):
            await batches.cancel("", running.id)
        await settle(batches)
        batches.files.delete(batches.files.find("", running.input_file_id))
        await batches.close()

    asyncio.run(main())


def test_one_that_was_being_cancelled_waits_for_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        place = BatchFolder(tmp_path)
        batches = await place.open(answering())
        first, second = await begin(batches, line("a")), await begin(batches, line("b"))
        for state in (first, second):
            await wait_for(state, "in_progress")
        await batches.close()
        record = tmp_path / "batches" / f"{second.id}.json"
        record.write_text(record.read_text().replace('"status":"in_progress"', '"status":"cancelling"'))
        batches = await place.open(answering())
        await wait_for(batches.find("", second.id), "cancelled")
        assert batches.find("", first.id).status == "in_progress"
        await batches.close()

    asyncio.run(main())


def test_large_lines_leave_turns_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.batches.job.MAX_LIGHT_BYTES", 100)

    async def main() -> None:
        batches = await BatchFolder(tmp_path).open(answering("small"))
        batches._limit.grow(2)
        large = await begin(batches, *(line(str(number), prompt="x" * 200) for number in range(3)))
        await wait_for(large, "in_progress")
        await wait_for(await begin(batches, line("small"), tenant="other"), "completed")
        await batches.close()

    asyncio.run(main())


def test_what_fails_in_sweeping_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        batches = await BatchFolder(tmp_path).open(Scripted())
        monkeypatch.setattr(batches.files, "delete_expired", (tmp_path / "none").read_bytes)
        monkeypatch.setattr(batches_module, "SWEEP_S", 0.0)
        monkeypatch.setattr(batches_module, "POLL_S", 0.005)
        await asyncio.sleep(0.6)
        assert len(batches._tasks) == 1  # who looks after them
        await batches.close()

    asyncio.run(main())


def test_time_runs_out(tmp_path: Path) -> None:
    async def main() -> None:
        place = BatchFolder(tmp_path)
        batches = await place.open(answering("a"))
        state = await begin(batches, line("a"), line("b"), line("c"))
        while state.num_completed < 1:
            await asyncio.sleep(0.005)
        place.now_s += DAY_S
        await wait_for(state, "expired")
        assert len(place.read(batches, state.output_file_id)) == 1
        assert {one["error"]["code"] for one in place.read(batches, state.error_file_id)} == {"batch_expired"}
        assert state.as_json()["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        await settle(batches)
        place.now_s += 61 * DAY_S
        await batches.sweep()
        assert batches.list_for("") == [] and list((tmp_path / "files").iterdir()) == []
        await batches.close()

    asyncio.run(main())


def test_no_room_ends_it_with_what_there_is(tmp_path: Path) -> None:
    async def answer(prompt: str) -> tuple[int, bytes]:
        return 200, b'"' + b"x" * 600 + b'"'

    async def main() -> None:
        place = BatchFolder(tmp_path, max_bytes=4000)
        batches = await place.open(Scripted(answer))
        state = await begin(batches, *(line(str(number)) for number in range(20)))
        await wait_for(state, "failed")
        assert state.as_json()["errors"]["data"][0]["code"] == "storage_full"
        assert 1 <= len(place.read(batches, state.output_file_id)) < 6
        await batches.close()

    asyncio.run(main())


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.batches.job.PAUSES_S", (0.01, 0.02))

    async def main() -> None:
        refused = [429, 503, 503]

        async def answer(prompt: str) -> tuple[int, bytes]:
            return (refused.pop(), b"{}") if refused else (200, b'{"ok":1}')

        place = BatchFolder(tmp_path)
        batches = await place.open(Scripted(answer))
        state = await begin(batches, line("a"))
        await wait_for(state, "completed")
        assert state.error_file_id is None and len(place.read(batches, state.output_file_id)) == 1
        await batches.close()

    asyncio.run(main())


def test_input_is_checked_before_anything_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "MAX_LINES", 6)
    path = tmp_path / "in"

    def codes(*entries: str) -> list[tuple[str, int | None]]:
        path.write_text("\n".join(entries))
        return [(error.code, error.line) for error in check_lines(path, TEXTS, 300).errors]

    assert codes(line("a"), "", line("b")) == []
    assert codes("") == [("empty_file", None)]
    assert codes(line("a"), line("a"), "{", line("b", "/v1/embeddings", input="x"), line("c", stream=True)) == [
        ("duplicate_custom_id", 2),
        ("invalid_json_line", 3),
        ("mismatched_endpoint", 4),
        ("invalid_body", 5),
    ]
    assert codes(*(line(str(number)) for number in range(9))) == [("too_many_requests", 7)]
    assert codes(line("a", prompt="x" * 400)) == [("line_too_large", 1)]

    async def main() -> None:
        place, client = BatchFolder(tmp_path), Scripted()
        batches = await place.open(client)
        state = await begin(batches, line("a"), "nonsense")
        await wait_for(state, "failed")
        assert state.as_json()["errors"]["data"][0]["line"] == 2 and client.asked == []
        await batches.close()

    asyncio.run(main())


def test_only_so_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "MAX_UNFINISHED", 1)

    async def main() -> None:
        batches = await BatchFolder(tmp_path).open(answering())
        await begin(batches, line("a"))
        with pytest.raises(Exception, match="limits are 1"):
            await begin(batches, line("b"))
        await batches.close()

    asyncio.run(main())


def test_batches_leave_rows_to_clients() -> None:
    async def main() -> None:
        turns, running, most = ConcurrencyLimit(), 0, 0

        async def take() -> None:
            nonlocal running, most
            async with turns:
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.001)
                running -= 1

        await asyncio.gather(*(take() for _ in range(6)))
        assert most == 1
        turns.grow(3)
        turns.grow(2)
        await asyncio.gather(*(take() for _ in range(9)))
        assert most == turns.limit == 3

    asyncio.run(main())
