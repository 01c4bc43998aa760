"""Pasting into a chat, and talking on when its context is full."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.cli import main
from penstock.commands.chat.conversation import ChatMemory, fit
from penstock.errors import InvalidRequest

DUMMY = ("--load-format", "dummy", "--threads", "1")
PROMPT = ">>>"


def test_pastes_at_a_terminal(chat_model: str, tmp_path: Path, home: Path, terminal: Callable[..., Any]) -> None:
    saved = tmp_path / "talk.json"
    chat = terminal("chat", chat_model, "--verbose", "--max-tokens", "3", *DUMMY)
    chat.expect(PROMPT)
    chat.type("\x1b[200~first\nsecond\n/third\x1b[201~")
    chat.expect("/third")
    assert "tok/s" not in chat.screen, "a marked paste waits for Enter"
    chat.type("\r")
    chat.expect("tok/s", PROMPT)
    chat.type("one\rtwo\rthr")
    chat.expect("...", "...", "thr")
    chat.type("ee\r")
    chat.expect("tok/s", PROMPT)
    chat.type(f"/save {saved}\r")
    chat.expect("saved to", PROMPT)
    chat.type("\x04")
    assert chat.status() == 0
    said = [message["content"] for message in json.loads(saved.read_text()) if message["role"] == "user"]
    assert said == ["first\nsecond\n/third", "one\ntwo\nthree"]
    history = home / "chat_history.jsonl"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [json.loads(line) for line in history.read_text().splitlines()] == [*said, f"/save {saved}"]

    chat = terminal("chat", chat_model, "--max-tokens", "3", *DUMMY)
    chat.expect(PROMPT)
    chat.type("\x1b[A\x1b[A")  # up: the history of the chat before
    chat.expect("one", "...", "three")
    chat.type("\x04\x03\x04")
    assert chat.status() == 0


def test_a_full_context_forgets_the_oldest_turns(
    chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "talk.json"
    turns = [f"turn {number} " + "x" * 30 for number in range(6)]
    lines = "\n".join([*turns, "y" * 300, "again", f"/save {saved}", ""])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert (
        main(
            [
                "chat",
                chat_model,
                "--max-tokens=4",
                "--temperature=0",
                "--max-model-len=200",
                "--system",
                "Be brief.",
                *DUMMY,
            ]
        )
        == 0
    )
    told = capsys.readouterr().err
    notes = [line for line in told.splitlines() if line.startswith("note: ") and "is cut" not in line]
    assert len(notes) >= 2 and "context of 200 tokens is full, so the oldest turn is no longer sent" in notes[0]
    assert told.count("error: ") == 1 and "shorten it" in told and "truncate_prompt_tokens" not in told
    said = [message["content"] for message in json.loads(saved.read_text()) if message["role"] != "assistant"]
    assert said == ["Be brief.", *turns, "again"], "all that was answered is saved, and the chat went on"


def test_what_is_forgotten(chat_model: str) -> None:
    conversation = ChatMemory("S")
    for number in range(40):
        conversation.add("user", f"question {number}")
        conversation.add("assistant", "a" * 60)
    conversation.add("user", "last")
    with LLM(chat_model, load_format="dummy", threads=1, max_model_len=1000, progress=False) as llm:
        longest = llm.service.intake.longest
        forgotten = fit(llm, conversation, None)
        sent = conversation.sent_messages()
        num_tokens = len(llm.service.intake.encode_messages(sent).tokens)
        assert 0 < forgotten < 40 and sent[0]["role"] == "system" and sent[1]["content"] == f"question {forgotten}"
        assert longest - longest // 4 - 120 < num_tokens <= longest - longest // 4, "a quarter is left for the answer"
        assert fit(llm, conversation, None) == 0
        before = conversation.sent_messages()
        conversation.add("user", "z" * 2000)
        with pytest.raises(InvalidRequest, match="start with --max-model-len up to 16384"):
            fit(llm, conversation, None)
        conversation.drop_last()
        with pytest.raises(InvalidRequest, match="leaves 9.. tokens for an answer; shorten it, lower --max-tokens"):
            fit(llm, conversation, 999)
        assert conversation.sent_messages() == before and len(conversation.messages) == 82
