"""What the commands of a chat do, and what is kept of what was typed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.commands.chat import settings
from penstock.commands.chat.conversation import ChatMemory
from penstock.commands.chat.history import MAX_ENTRIES, SLACK, HistoryFile
from penstock.commands.chat.keyboard import join_lines
from penstock.commands.chat.session import Session
from penstock.commands.chat.slash import SLASHES, SlashWords, help_text, split
from penstock.errors import InvalidRequest

DUMMY = ("--load-format", "dummy", "--threads", "1")


def talk() -> ChatMemory:
    memory = ChatMemory("S")
    for number in range(3):
        memory.add("user", f"question {number}")
        memory.add("assistant", f"answer {number}")
    return memory


def test_a_session_of_commands(chat_model: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}')
    lines = [
        "/set temperature 0",
        "/set temperature hot",
        "/set nonsense 1",
        "/set",
        "/system Be brief.",
        "/etc/hosts is a file",
        f"/schema {tmp_path / 'schema.json'}",
        "again",
        "/schema off",
        "/regenerate",
        "/undo",
        "/undo",
        "/undo",
        "/bye now",
        f"/save {tmp_path / 'talk.json'}",
        f"/load {tmp_path / 'none.json'}",
        "/load",
        f"/model {tmp_path}",
        f"/model {chat_model}",
        "/model",
        "hello",
        f"/save {tmp_path / 'talk.json'}",
    ]
    command = [sys.executable, "-m", "penstock", "chat", chat_model, "--max-tokens=9", *DUMMY]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120)
    told = done.stderr
    assert done.returncode == 0 and '{"a":1}' in "".join(done.stdout.split())
    for words in (
        "temperature: 0.0 (set here)",
        "/set temperature takes a number, not 'hot'",
        "note: the answer is cut: 9 tokens is the limit (/set max_tokens)",
        "/set has no 'nonsense': the names are max_tokens",
        "system message: Be brief.",
        "taken back: again",
        "taken back: /etc/hosts is a file",
        "error: there is no message yet",
        "/bye takes nothing after it",
        "none.json: No such file or directory; name a file that /save wrote as JSON",
        "error: /load needs a file name",
        "the conversation goes on",
        "on this machine: none",
    ):
        assert words in told, words
    assert "Traceback" not in told and "unexpected" not in told
    said = json.loads((tmp_path / "talk.json").read_text())
    assert [(one["role"], one["content"]) for one in said][:2] == [("system", "Be brief."), ("user", "hello")]


def test_settings_are_shown_as_they_are_typed() -> None:
    from penstock.types import SamplingParams

    shown = {name: settings.describe_setting(name, {}, SamplingParams()) for name in settings.KINDS}
    assert not {"None", "True", "False", "[]"} & set(shown.values())
    assert shown["ignore_eos"] == "off" and shown["stop"] == "none" and shown["thinking_token_budget"] == "not set"
    assert settings.describe_setting("ignore_eos", {"ignore_eos": True}, None) == "on (set here)"
    assert not any("[default" in note for note in settings.NOTES.values())


def test_what_is_a_command() -> None:
    assert split("/save a b ") == ("/save", "a b") and split("/?") == ("/help", "")
    assert split("/etc/hosts?") is None and split("/clear\nit") is None and split("hello") is None
    assert all(name in help_text() for name in SLASHES)


def test_a_turn_is_taken_back() -> None:
    memory = talk()
    assert memory.drop_turn() == "question 2" and len(memory.messages) == 5
    memory.add("user", "unanswered")
    assert memory.drop_turn() == "unanswered" and memory.messages[-1]["content"] == "answer 1"
    memory.forget_before(3)
    assert (memory.drop_turn(), memory.drop_turn()) == ("question 1", "question 0")
    assert memory.turns() == [] and memory.messages == [{"role": "system", "content": "S"}]
    with pytest.raises(InvalidRequest, match="no message yet"):
        memory.drop_turn()


def test_the_system_message_changes() -> None:
    memory = talk()
    memory.forget_before(3)
    sent = memory.sent_messages()
    memory.set_system(None)
    assert memory.sent_messages() == sent[1:] and memory.system is None
    memory.set_system("T")
    assert memory.sent_messages() == [{"role": "system", "content": "T"}, *sent[1:]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '[{"role": "user"}]',
        '[{"role": "tool", "content": "x"}]',
        '[{"role": "assistant", "content": "x"}]',
        '[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]',
        '[{"role": "system", "content": "y"}]',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation(text: str, tmp_path: Path) -> None:
    memory = talk()
    before = list(memory.messages)
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(InvalidRequest, match="name a file that /save wrote as JSON"):
        memory.load(str(tmp_path / "talk.json"))
    assert memory.messages == before


def test_notes_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    memory = talk()
    memory.add("user", "\x1b]0;owned\x07\x9b2J hello")
    memory.add("assistant", "yes")
    partner: Any = None
    Session(partner, memory, {}, verbose=False, renders=True)._undo("")
    said = capsys.readouterr().err
    assert said.startswith("taken back: ␛]0;owned␇") and not {"\x1b", "\x07", "\x9b"} & set(said)


def test_a_saved_conversation_is_loaded(tmp_path: Path) -> None:
    path = talk().save(str(tmp_path / "talk.json"))
    memory = ChatMemory(None)
    assert memory.load(str(path)) == 7 and memory.messages == talk().messages and memory.system == "S"
    memory.drop_turn()
    memory.save(str(path))  # one's own file may be written again


def test_settings() -> None:
    assert settings.change({"top_k": 3}, "top-p 0.5") == {"top_k": 3, "top_p": 0.5}
    assert settings.change({"top_k": 3}, "top_k default") == {}
    assert settings.change({}, 'stop ["a", "\\n"]') == {"stop": ("a", "\n")}
    assert settings.change({}, "ignore_eos on") == {"ignore_eos": True}
    for bad in ("top_p 2", "top_k 1.5", "ignore_eos maybe", "seed", "nothing 1"):
        with pytest.raises(InvalidRequest):
            settings.change({}, bad)


def test_completion(tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    (tmp_path / "only").mkdir()
    (tmp_path / ".hidden").touch()
    words = SlashWords(lambda: ["smollm2", "gemma3-270m"])

    def complete(typed: str) -> list[str]:
        return [word for word, _ in words.complete(typed)]

    assert complete("/sy") == ["/system"] and complete("/nothing x") == [] and complete("/model g") == ["gemma3-270m"]
    assert complete("/set top_") == ["top_p", "top_k", "top_n_sigma"]
    assert complete(f"/load {tmp_path}/o") == [f"{tmp_path}/one.json", f"{tmp_path}/only/"]
    assert complete(f"/load {tmp_path}/.h") == [f"{tmp_path}/.hidden"] and len(complete(f"/load {tmp_path}/")) == 2
    assert complete("/load /no/such/folder/") == []


def test_lines_of_the_editor_make_one_message() -> None:
    assert join_lines("one \\\ntwo") == "one \ntwo" and join_lines("  hello ") == "hello"
    assert join_lines('"""first\n  second\nthird"""') == "first\n  second\nthird"
    assert join_lines("  def f():\n      return 1\n\nf()") == "  def f():\n      return 1\n\nf()"
    assert join_lines('"""open') == '"""open'


def test_the_history_is_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "home" / "history"
    history = HistoryFile(path)
    assert history.load() == []
    os.chmod(path, 0o644)
    for number in range(MAX_ENTRIES + SLACK + 1):
        history.append(f"entry {number}\nof two lines \ud800")
    history.append("x" * 100_000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entries = history.load()
    assert len(entries) == MAX_ENTRIES and entries[-1] == f"entry {MAX_ENTRIES + SLACK}\nof two lines \ud800"
    assert len(path.read_bytes().splitlines()) == MAX_ENTRIES, "the file was cut"
    with path.open("ab") as file:
        file.write(b'damaged\n{"a": 1}\n"whole"\n"half')
    assert history.load()[-1] == "whole"


def test_a_history_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("untouched")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    for name in ("link", "", "secret/below"):
        history = HistoryFile(tmp_path / name)
        history.append("entry")
        assert history.load() == []
    assert (tmp_path / "secret").read_text() == "untouched"
