from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.commands.chat.conversation import ChatMemory
from penstock.commands.chat.keyboard import read_message
from penstock.errors import InvalidRequest

DUMMY = ("--load-format", "dummy", "--threads", "1")
PROMPT = ">>>"


def typed(*lines: str) -> str:
    rest = list(lines)
    return read_message(lambda prompt: rest.pop(0))


def test_messages_of_one_line_and_of_several() -> None:
    assert typed("  hello ") == "hello"
    assert typed("one \\", "two\\", "three") == "one \ntwo\nthree"
    assert typed('"""first', "  second", 'third"""') == "first\n  second\nthird"
    assert typed('"""', "/bye", '"""') == "/bye"
    assert typed('"""one line"""') == "one line"


def test_the_end_of_input_in_the_middle_of_a_message() -> None:
    def read_line(prompt: str) -> str:
        if prompt.startswith(PROMPT):
            return '"""open'
        raise EOFError

    with pytest.raises(EOFError):
        read_message(read_line)


def test_saving_never_overwrites_what_another_wrote(tmp_path: Path) -> None:
    conversation = ChatMemory("Be brief.")
    conversation.add("user", "Hi")
    conversation.add("assistant", "Hello")
    assert json.loads(conversation.save(str(tmp_path / "talk.json")).read_text()) == conversation.messages
    conversation.add("user", "More")
    assert len(json.loads(conversation.save(str(tmp_path / "talk.json")).read_text())) == 4
    text = conversation.save(str(tmp_path / "talk.md")).read_text()
    assert text.startswith("## system\n\nBe brief.\n\n## user\n\nHi\n")
    (tmp_path / "mine.md").write_text("mine")
    with pytest.raises(InvalidRequest, match="exists already"):
        conversation.save(str(tmp_path / "mine.md"))
    assert (tmp_path / "mine.md").read_text() == "mine"
    with pytest.raises(InvalidRequest, match="cannot save"):
        conversation.save(str(tmp_path / "no" / "folder.md"))
    conversation.clear()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_a_session_at_a_terminal(chat_model: str, tmp_path: Path, terminal: Callable[..., Any]) -> None:
    saved = tmp_path / "talk.json"
    chat = terminal("chat", chat_model, "--verbose", "--temperature", "1", "--max-tokens", "12000", *DUMMY)
    chat.expect("/help lists", PROMPT)
    chat.type("/help\r")
    assert "/save FILE" in chat.expect("several lines", PROMPT)
    chat.type("/frobnicate\r")
    chat.expect("error: unknown command /frobnicate", PROMPT)
    chat.type("\x03")
    chat.expect("Ctrl-D or /bye leaves", PROMPT)

    chat.type("two\\\r")
    chat.expect("...")
    chat.type("lines\r")
    wait_for_answer(chat)
    chat.type("\x03")
    first = chat.expect("stopped", " generated tokens", PROMPT)
    assert 0 < number_before(first, " generated tokens") < 12000

    chat.type("again\r")
    wait_for_answer(chat)
    chat.type("\x03")
    second = chat.expect(" generated tokens", PROMPT)
    assert number_before(second, " cached)") >= 16, "the conversation so far is found in the prefix cache"

    chat.type(f"/save {saved}\r")
    chat.expect("saved to", PROMPT)
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "two\nlines"
    chat.type("/clear\r")
    chat.expect("cleared", PROMPT)
    chat.type("\x04")
    assert chat.status() == 0 and "Traceback" not in chat.screen


def wait_for_answer(chat: Any) -> None:
    """Some of the answer is on the screen: more than what was typed and echoed."""
    length = len(chat.screen)
    while len(chat.screen) < length + 60:
        assert chat._more()


def number_before(text: str, words: str) -> int:
    return int(text[: text.index(words)].split()[-1].strip("("))


def test_run_without_a_prompt_at_a_terminal_is_a_chat(chat_model: str, terminal: Callable[..., Any]) -> None:
    chat = terminal("run", chat_model, "--max-tokens", "2", *DUMMY)
    chat.expect(PROMPT)
    chat.type("hello\r")
    chat.expect(PROMPT)
    chat.type("/bye\r")
    assert chat.status() == 0


def test_a_chat_from_a_pipe(chat_model: str, tmp_path: Path) -> None:
    lines = f"hello\n/save {tmp_path / 'talk.json'}\n" + "x" * 300 + "\nagain\n"
    command = [sys.executable, "-m", "penstock", "chat", chat_model, "--max-tokens=4", "--max-model-len=200", *DUMMY]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and PROMPT not in done.stdout
    assert "error: this message alone is too long" in done.stderr, "it is refused, and the chat goes on"
    answer = json.loads((tmp_path / "talk.json").read_text())[1]["content"]
    assert done.stdout.startswith(answer) and len(done.stdout) > len(answer) + 1


def test_a_model_without_a_template_cannot_chat(plain_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", plain_model, *DUMMY]) == 1
    assert "has no chat template" in capsys.readouterr().err
