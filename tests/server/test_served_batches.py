"""Batches of a running server: the official client, a server that is killed, and clients who come first."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.server.common.fields import SamplingBody
from penstock.server.config import ServerConfig
from penstock.server.http.context import Client
from penstock.server.state import BATCH_PRIORITY, Server
from penstock.text.prompt_encoder import Encoded
from tests.server.running import RunningServer
from tests.server.test_batches import TEXTS, line


def client(running: RunningServer, key: str = "two") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def finished(openai_client: openai.OpenAI, id: str) -> Any:
    end = time.monotonic() + 60
    while (batch := openai_client.batches.retrieve(id)).status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def test_the_official_client_runs_one(keeping: RunningServer) -> None:
    ours = client(keeping)
    entries = [line(str(number), prompt=f"number {number}", max_tokens=4, model="tiny") for number in range(6)]
    entries.append(line("no", model="nobody", prompt="x"))
    uploaded = ours.files.create(file=("in.jsonl", "\n".join(entries).encode()), purpose="batch")
    made = ours.batches.create(input_file_id=uploaded.id, endpoint=TEXTS, completion_window="24h")
    batch = finished(ours, made.id)
    assert batch.status == "completed" and batch.request_counts.total == 7
    output = [json.loads(one) for one in ours.files.content(batch.output_file_id).text.splitlines()]
    assert {one["custom_id"] for one in output} == set("012345")
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 4 for one in output)
    failed = json.loads(ours.files.content(batch.error_file_id).text)
    assert failed["response"]["status_code"] == 404 and failed["custom_id"] == "no"
    assert [one.id for one in ours.batches.list(limit=1)][0] == batch.id
    stranger = client(keeping, "one")
    assert stranger.batches.list().data == []
    for ask in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        stranger.batches.create(input_file_id=uploaded.id, endpoint=TEXTS, completion_window="24h")
    with pytest.raises(openai.ConflictError):
        ours.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        ours.batches.create(input_file_id=uploaded.id, endpoint="/v1/moderations", completion_window="24h")


@pytest.mark.slow
def test_a_killed_server_is_followed_by_one_that_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    arguments = (
        str(tiny_model),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--served-model-name",
        "tiny",
        "--data-folder",
        str(tmp_path),
    )
    body: dict[str, Any] = {"prompt": [20, 21], "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 3}
    entries = [line(str(number), **body) for number in range(30)]
    with RunningServer(*arguments) as running:
        ours = client(running)
        uploaded = ours.files.create(file=("in.jsonl", "\n".join(entries).encode()), purpose="batch")
        made = ours.batches.create(input_file_id=uploaded.id, endpoint=TEXTS, completion_window="24h")
        end = time.monotonic() + 60
        while ours.batches.retrieve(made.id).request_counts.completed < 3:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.01)
        begun_s = time.monotonic()
        answer = httpx.post(f"{running.url}{TEXTS}", json={"prompt": [5], "max_tokens": 1}, timeout=30)
        assert answer.status_code == 200 and time.monotonic() - begun_s < 5  # a client does not wait for the batch
        running.stop(signal.SIGKILL)
    with RunningServer(*arguments) as running:
        batch = finished(client(running), made.id)
        assert batch.status == "completed" and batch.request_counts.completed == 30
        output = [json.loads(one) for one in client(running).files.content(batch.output_file_id).text.splitlines()]
        assert sorted(int(one["custom_id"]) for one in output) == list(range(30))
        assert len({one["response"]["body"]["choices"][0]["text"] for one in output}) == 1


def test_batches_come_behind_clients() -> None:
    """Whatever priority a line asks for."""

    class Taken(Exception):
        pass

    class Model:
        name = "tiny"

        def has_to_prepare(self, *_: object) -> bool:
            return False

        @property
        def loras(self) -> Model:
            return self

        def __contains__(self, _: object) -> bool:
            return True

        def resolve(self, *_: object) -> tuple[()]:
            return ()

        @property
        def text(self) -> Model:
            return self

        async def prepare(self, *_: object) -> None:
            return None

        def make_request(self, *_: object, priority: int, **__: object) -> None:
            raise Taken(priority)

    server = Server(ServerConfig(), None, None)  # type: ignore[arg-type]
    for client, least in ((Client("a"), -5), (Client("a", is_batch=True), BATCH_PRIORITY)):
        with pytest.raises(Taken) as caught:
            asyncio.run(
                server.generate(
                    Model(),  # type: ignore[arg-type]
                    client,
                    SamplingBody.model_validate({"priority": -5}),
                    [(Encoded([1]), None)],  # type: ignore[list-item]
                )
            )
        assert caught.value.args == (least,)
