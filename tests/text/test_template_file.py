"""A chat template that the user gives: checked before anything starts, then used as the model's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import LLM
from penstock.api.idle_options import find_idle
from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.text.chat.template import MAX_TEMPLATE_BYTES, read_template
from penstock.text.tokenizers.tokenizer import Tokenizer
from tests.llm import tiny

GIVEN = "{% for message in messages %}<end>{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_a_file_and_a_text(tmp_path: Path) -> None:
    file = tmp_path / "given.jinja"
    file.write_text(GIVEN)
    assert read_template(str(file)) == read_template(GIVEN) == GIVEN


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (None, "No such file"),
        ("{% for a in b %}\n{{ a }}\n{% endif %}", "line 3"),
        ("{{ a", "line 1"),
        ("", "is empty"),
        (b"\xff\xfe{{ a }}", "not UTF-8"),
        ("x" * (MAX_TEMPLATE_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_what_is_refused(tmp_path: Path, written: str | bytes | None, words: str) -> None:
    file = tmp_path / "given.jinja"
    if written is not None:
        file.write_bytes(written.encode() if isinstance(written, str) else written)
    with pytest.raises(InvalidConfig, match=words) as refused:
        read_template(str(file))
    assert "chat_template" in str(refused.value) and "\n" not in str(refused.value)


def test_folders_and_pipes_are_no_templates(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidConfig, match="cannot be read"):
            read_template(str(path))


def test_a_wrong_one_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(InvalidConfig, match="chat_template is not a Jinja template: line 1"):
        LLM("no/such-model", chat_template="{{ messages")


def test_a_model_without_a_template_can_chat(tmp_path: Path) -> None:
    name = tiny.write_config(tmp_path, vocab_size=300, max_position_embeddings=512)
    tiny.write_tokenizer(tmp_path, template=None)
    with tiny.dummy(name, skip_tokenizer_init=False, chat_template=GIVEN) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.chat_template == GIVEN
        outputs = llm.chat([{"role": "user", "content": "hi <end>"}], use_tqdm=False)
        assert outputs[0].prompt == "<end>user: hi <end>\n"
        assert outputs[0].prompt_token_ids.count(0) == 1, "a message's control token is text, the template's is one"
        assert ("chat_template", GIVEN, "set by the user") in [(one.name, one.value, one.why) for one in llm.settings]


def test_it_takes_the_place_of_all_the_models_own(tmp_path: Path) -> None:
    from penstock.text.program import LocalProgram

    tiny.write_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
    made = Tokenizer.of(LocalProgram.load(tmp_path, template="{{ 'given' }}"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert made.apply_chat_template([{"role": "user", "content": "x"}], tools=tools) == "given"


def test_ends_of_turns_that_it_writes_end_answers() -> None:
    from penstock.text.program import LocalProgram

    key = "tokenizer.ggml."
    metadata = {
        key + "model": "gpt2",
        key + "pre": "gpt-2",
        key + "tokens": ["a", "</s>", "<|im_end|>", "<|eot_id|>"],
        key + "token_type": [1, 3, 3, 3],
        key + "eos_token_id": 1,
    }
    assert LocalProgram.load(metadata).vocabulary.eos_token_ids == (1,)
    given = LocalProgram.load(metadata, template="{{ messages }}<|im_end|>")
    assert given.vocabulary.eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("options", "has_cache", "idle"),
    [({}, True, ""), ({}, False, "the model makes embeddings"), ({"skip_tokenizer_init": True}, True, "no tokenizer")],
)
def test_where_it_is_without_effect_the_settings_say_so(options: dict[str, bool], has_cache: bool, idle: str) -> None:
    found = find_idle(EngineConfig.from_options(chat_template=GIVEN, **options), "cpu", 0.0, has_cache)
    assert idle in found["chat_template"] if idle else not found
