"""`penstock run-batch`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.server.batch.entries import BadEntry, BatchEntry, OutputFile, make_error_result, make_result, parse_entry

COMMAND = [sys.executable, "-m", "penstock", "run-batch"]
CHAT = "/v1/chat/completions"


def asked(custom_id: str, url: str = CHAT, **body: Any) -> str:
    if url == CHAT:
        body = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 8,
            **body,
        }
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "line, code, custom_id",
    [
        ("{", "invalid_json_line", None),
        ("[]", "invalid_json_line", None),
        ("{}", "missing_custom_id", None),
        ('{"custom_id": 3}', "missing_custom_id", None),
        ('{"custom_id": "a", "method": "GET"}', "invalid_method", "a"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/files"}', "invalid_url", "a"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}', "invalid_body", "a"),
        (asked("a", stream=True), "invalid_body", "a"),
    ],
)
def test_bad_lines(line: str, code: str, custom_id: str | None) -> None:
    with pytest.raises(BadEntry) as caught:
        parse_entry(line.encode())
    result = make_error_result(caught.value, 7)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == (custom_id, None, code)


def test_a_half_line_is_removed_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputFile(path) as output:
        output.append(make_result(BatchEntry("a", CHAT, b"{}"), 200, b'{"x":1}'))
        output.append(make_result(BatchEntry("b", CHAT, b"{}"), 400, b"{}"))
        output.append(make_error_result(BadEntry("invalid_json_line", "no"), 3))
    whole = path.read_bytes()
    for cut in (1, 30, len(whole) - whole.rstrip(b"\n").rfind(b"\n") - 2):
        path.write_bytes(whole[:-cut])
        with OutputFile(path) as output:
            assert output.done == {"a", "b"}
            assert output.num_lines == (3 if cut == 1 else 2)
        assert path.read_bytes() == (whole if cut == 1 else whole[: whole.rstrip(b"\n").rfind(b"\n") + 1])


@pytest.mark.parametrize("text", ["notes of mine", "notes of mine\n", asked("a") + "\n"])
def test_another_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="line 1 is not a batch result"):
        OutputFile(path)
    assert path.read_text() == text


def test_a_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        *(asked(f"chat-{number}", model="smollm2") for number in range(6)),
        asked("text", "/v1/completions", prompt="The capital of France is", max_tokens=2, temperature=0),
        asked("no model", model="nobody"),
        asked("embedding", "/v1/embeddings", input="x"),
        "not json",
        "",
        asked("chat-1"),
    ]
    source.write_text("\n".join(lines))
    done = run(source, "-o", target, "--max-model-len", 512)
    results = {result["custom_id"]: result for result in read(target) if result["error"] is None}
    assert done.returncode == 1 and "11 added, 4 failed" in done.stderr
    for number in range(6):
        body = results[f"chat-{number}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert results["text"]["response"]["body"]["choices"][0]["text"] == " Paris."
    assert results["no model"]["response"]["status_code"] == 404
    assert results["embedding"]["response"]["body"]["error"]["type"] == "invalid_request_error"
    errors = sorted((result["error"]["line"], result["error"]["code"]) for result in read(target) if result["error"])
    assert errors == [(10, "invalid_json_line"), (12, "duplicate_custom_id")]

    again = run(source, "-o", target, "--model", "/no/such/model")  # nothing is left that needs one
    assert again.returncode == 1 and "11 were there before, 0 added" in again.stderr
    assert len(read(target)) == 11

    source.write_text("\n".join([*lines, asked("new")]))
    missing = run(source, "-o", target, "--model", "/no/such/model")
    assert missing.returncode == 1 and "/no/such/model" in missing.stderr and len(read(target)) == 11


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join(
            [
                asked("short", max_tokens=1),
                *(asked(str(number), max_tokens=1500, ignore_eos=True) for number in range(4)),
            ]
        )
    )
    process = subprocess.Popen([*COMMAND, str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (target.exists() and target.read_text()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "run it again" in said
    assert [result["custom_id"] for result in read(target)] == ["short"]
