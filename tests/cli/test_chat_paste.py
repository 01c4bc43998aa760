"""Pasting into a chat, and talking on when its context is full."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.cli import main
from penstock.commands.chat.conversation import ChatMemory, fit
from penstock.commands.chat.keyboard import Keyboard, read_message
from penstock.errors import InvalidRequest

DUMMY = ("--load-format", "dummy", "--threads", "1")
PROMPT = ">>> "


def arrived(*lines: str) -> str:
    """A message whose lines came together."""
    rest = list(lines)
    return read_message(lambda prompt: rest.pop(0), lambda: bool(rest))


def test_lines_that_arrive_together_are_one_message() -> None:
    assert arrived("  def f():", "      return 1", "", "f()") == "  def f():\n      return 1\n\nf()"
    assert arrived("/clear", "hello") == "/clear", "a command stands alone"
    assert arrived("see", "/etc/hosts") == "see\n/etc/hosts"

    def ending(prompt: str) -> str:
        if prompt == PROMPT:
            return "hello"
        raise EOFError

    assert read_message(ending, lambda: True) == "hello"


def test_half_a_line_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        keyboard = Keyboard()
        keyboard.is_terminal = True
        assert not keyboard.has_more()
        os.write(master, b"half")
        assert keyboard.has_more()
        os.write(master, b" a line\n")
        assert stdin.readline() == "half a line\n" and not keyboard.has_more()
    os.close(master)


def test_pastes_at_a_terminal(chat_model: str, tmp_path: Path, terminal: Callable[..., Any]) -> None:
    saved = tmp_path / "talk.json"
    chat = terminal("chat", chat_model, "--max-tokens", "3", *DUMMY)
    chat.expect(PROMPT)
    time.sleep(0.3)  # readline shows its prompt a moment before it listens
    chat.type("\x1b[200~first\nsecond\n/third\x1b[201~")
    time.sleep(0.3)
    assert chat.screen.count(PROMPT) == 1, "a marked paste waits for Enter"
    chat.type("\n")
    chat.expect(PROMPT)
    time.sleep(0.3)
    chat.type("one\ntwo\nthr")
    chat.expect("... ", "... ", "thr")
    chat.type("ee\n")
    chat.expect(PROMPT)
    chat.type(f"/save {saved}\n")
    chat.expect("saved to", PROMPT)
    chat.type("\x04")
    assert chat.status() == 0
    said = [message["content"] for message in json.loads(saved.read_text()) if message["role"] == "user"]
    assert said == ["first\nsecond\n/third", "one\ntwo\nthree"]


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
    notes = [line for line in told.splitlines() if line.startswith("note: ")]
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
