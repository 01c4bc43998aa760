"""Reasoning and answer told apart, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.answer_events import ReasoningDelta, TextDelta
from penstock.text.chat.reasoning import REASONING, ReasoningSplitter, detect_kind, new_splitter
from tests.text.streams import cut, places, run

EXAMPLES = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", False, [("reasoning", "Two and two.\n"), ("text", "Four.")]),
    ("Two and two.\n</think>\n\nFour.", True, [("reasoning", "Two and two.\n"), ("text", "Four.")]),
    ("\n\nTwo </thin ></think>Four", True, [("reasoning", "Two </thin >"), ("text", "Four")]),
    ("<think>\nagain</think>x", True, [("reasoning", "again"), ("text", "x")]),
    (" \n<think>a</think> b", False, [("reasoning", "a"), ("text", " b")]),
    ("<think>\n\n</think>\n\nFour.", False, [("text", "Four.")]),
    ("</think>\nFour.", True, [("text", "Four.")]),
    ("Four.", False, [("text", "Four.")]),
    ("\n Four.\n", False, [("text", "\n Four.\n")]),
    ("The tag <think> opens, </think> closes.", False, [("text", "The tag <think> opens, </think> closes.")]),
    ("<think>a</think>b<think>c</think>", False, [("reasoning", "a"), ("text", "b<think>c</think>")]),
    ("<think>never closed </thi", False, [("reasoning", "never closed </thi")]),
    ("<thi", False, [("text", "<thi")]),
    ("<thi", True, [("reasoning", "<thi")]),
    ("", False, []),
]


@pytest.mark.parametrize("text, inside, expected", EXAMPLES)
def test_examples(text, inside, expected):
    assert run(ReasoningSplitter(inside=inside), [text]) == expected
    assert run(ReasoningSplitter(inside=inside), list(text)) == expected


words = st.sampled_from(["<think>", "</think>", "\n", " ", "<", "a", "</", "think>"])
snippets = st.lists(words, max_size=12).map("".join)


@given(snippets, st.booleans(), places)
@settings(max_examples=300)
def test_cuts_change_nothing(text, inside, where):
    assert run(ReasoningSplitter(inside=inside), cut(text, where)) == run(ReasoningSplitter(inside=inside), [text])


def test_held_back_is_only_what_may_be_a_marker():
    splitter = ReasoningSplitter()
    assert splitter.push("<think>so</thi") == [ReasoningDelta("so")]
    assert splitter.push("s. ") == [ReasoningDelta("</this. ")]
    assert splitter.push("</think>\n") == []
    assert splitter.push("a</thi") == [TextDelta("a</thi")]


@pytest.mark.parametrize("kind", sorted(REASONING))
def test_every_kind(kind):
    marks = REASONING[kind]
    text = f"{marks.begin}\nwhy{marks.end}\nwhat"
    assert run(ReasoningSplitter(marks.begin, marks.end), list(text)) == [("reasoning", "why"), ("text", "what")]


def test_a_megabyte():
    text = "</think" * 150_000
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert run(ReasoningSplitter(inside=True), pieces) == [("reasoning", text)]


@pytest.mark.parametrize(
    "template, prompt, kind, inside",
    [
        (None, "<think>", None, False),
        ("{{ messages }}", "<think>", None, False),
        ("{% if '</think>' in content %}", "<|User|>hi<|Assistant|><think>\n", "deepseek_r1", True),
        ("<think></think>", "user: what is <think>?\nassistant:", "deepseek_r1", False),
        ("<think></think>", "assistant\n<think>\n\n</think>\n\n", "deepseek_r1", False),
        ("[THINK]{{ x }}[/THINK]", "[/INST][THINK]", "mistral", True),
    ],
)
def test_template_and_prompt_tell(template, prompt, kind, inside):
    assert detect_kind(template) == kind
    splitter = new_splitter(detect_kind(template), prompt)
    assert (splitter is not None) == (kind is not None)
    if splitter is not None:
        assert splitter.push("x") == [ReasoningDelta("x") if inside else TextDelta("x")]
