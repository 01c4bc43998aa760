"""gpt-oss's channels become reasoning, calls and text, however the stream is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.chat.harmony import ANALYSIS, HarmonySplitter
from penstock.text.chat.reasoning import detect_kind, find_block, new_splitter
from penstock.text.tools import detect_parser
from tests.text.streams import cut, places, run

TEMPLATE = "<|start|>system<|message|>…{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}"
ANSWER = f"{ANALYSIS}why<|end|><|start|>assistant<|channel|>final<|message|>what"
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'  # noqa: E501
)
SNIPPETS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|", "analysis", "final", "a ", "\n"]
SNIPPETS += ["to=functions.f", "{}"]


def parse(text: str, inside: bool = False) -> list[tuple[str, ...]]:
    return run(HarmonySplitter(inside, lambda: "id"), [text])


def test_channels() -> None:
    assert parse(ANSWER) == [("reasoning", "why"), ("text", "what")]
    assert parse("why<|end|><|start|>assistant<|channel|>final<|message|>what<|return|>", inside=True) == parse(ANSWER)
    called = [("reasoning", "why"), ("call", 0, "id", "weather"), ("arguments", 0, '{"city": "Oslo"}')]
    assert parse(f"{ANALYSIS}why<|end|>{CALL}") == called
    assert parse("<|channel|>commentary<|message|>I look.<|end|>" + CALL)[0] == ("text", "I look.")
    early = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert parse(early) == [("call", 0, "id", "f"), ("arguments", 0, "{}")]


def test_what_is_no_message() -> None:
    """Text without a header, as a grammar may force; a header that is cut off."""
    assert parse('{"a": 1}') == [("text", '{"a": 1}')]
    assert parse("<|channel|>final<|message|>done<|end|><|start|>assist") == [("text", "done")]
    assert parse("<|message|>hi<|en") == [("text", "hi<|en")]


@given(st.lists(st.sampled_from(SNIPPETS), max_size=25).map("".join), st.booleans(), places)
@settings(max_examples=200)
def test_cuts_change_nothing(text: str, inside: bool, where: list[int]) -> None:
    assert run(HarmonySplitter(inside, lambda: "id"), cut(text, where)) == parse(text, inside)


def test_the_template_tells() -> None:
    assert detect_kind(TEMPLATE) == "openai_gptoss" and detect_parser(TEMPLATE) == "openai"
    assert isinstance(new_splitter("openai_gptoss", "…<|start|>assistant"), HarmonySplitter)
    block = find_block("openai_gptoss", "…<|start|>assistant")
    assert block is not None and f"{block.begin}why{block.end}what" == ANSWER
