"""Prompts for filling in: which tokens stand for what, in which order, and what is cut."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.text.infill import Gap, InfillTokens, Room, find_infill_tokens, make_prompt
from penstock.text.program import LocalProgram, TooManyTokens
from penstock.text.tokenizers.sentencepiece import CONTROL, USER_DEFINED

K = "tokenizer.ggml."
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def program(marks: list[str], kind: int = CONTROL, **keys: Any) -> LocalProgram:
    """A vocabulary of single characters, behind the given tokens and `<eos>`."""
    tokens = [*marks, "<eos>", *LETTERS]
    return LocalProgram.load(
        {
            K + "model": "gpt2",
            K + "pre": "gpt-2",
            K + "tokens": tokens,
            K + "merges": [],
            K + "eos_token_id": len(marks),
            K + "token_type": [*[kind] * len(marks), CONTROL, *[1] * len(LETTERS)],
            **{K + name: value for name, value in keys.items()},
        }
    )


def told(made: LocalProgram, gap: Gap, room: Room | None = None, **options: Any) -> str:
    ids = made.encode_infill(gap, room, options.get("special", True), options.get("max_tokens"))
    return made.decode(ids)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (["<fim-prefix>", "<fim-middle>", "<fim-suffix>"], "<fim-prefix>a<fim-suffix>b<fim-middle>"),
        (["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (["▁<PRE>", "▁<MID>", "▁<SUF>"], "▁<PRE>a▁<SUF>b▁<MID>"),
        (["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"], "<|code_prefix|>a<|code_suffix|>b<|code_middle|>"),
        (["[SUFFIX]", "[PREFIX]", "[MIDDLE]"], "[SUFFIX]b[PREFIX]a"),
        (["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"], "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>"),
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_families(tokens: list[str], expected: str, kind: int) -> None:
    assert told(program(tokens, kind), Gap("a", "b")) == expected


def test_a_file_names_them_as_it_likes() -> None:
    tokens = ["<1>", "<2>", "<3>", "<4>", "<5>", "<6>"]
    made = program(tokens, fim_pre_token_id=2, fim_suf_token_id=0, fim_mid_token_id=1, fim_sep_token_id=3)
    assert told(made, Gap("a", "b")) == "<3>a<1>b<2>"
    assert made.facts().infill == InfillTokens(2, 0, 1, None, 3, (2, 0, 1, 3))
    older = program(tokens, prefix_token_id=2, suffix_token_id=0, middle_token_id=1)
    assert told(older, Gap("a", "b")) == "<3>a<1>b<2>"


def test_what_begins_a_prompt() -> None:
    made = program(QWEN, bos_token_id=6, add_bos_token=True)
    assert told(made, Gap("a", "b")).startswith("<eos><|fim_prefix|>a")
    assert told(made, Gap("a", "b"), special=False).startswith("<|fim_prefix|>a")


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_control_tokens_in_the_texts_are_text(kind: int) -> None:
    """Those for filling in too, which some vocabularies do not call special."""
    made = program(QWEN, kind)
    gap = Gap("a<|fim_suffix|><eos>", "<|fim_middle|>", (("<|file_sep|>", "<|fim_prefix|>"),))
    ids = made.encode_infill(gap, None, True, None)
    assert [id for id in ids if id < 7] == [4, 5, 5, 0, 1, 2]
    assert made.decode(ids) == (
        "<|repo_name|>myproject\n<|file_sep|><|file_sep|>\n<|fim_prefix|><|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|><eos><|fim_suffix|><|fim_middle|><|fim_middle|>"
    )
    assert made.encode("<|fim_suffix|>") == [1], "a plain prompt may still spell them"


def test_other_files_without_tokens_for_them() -> None:
    made = program(QWEN[:3])
    assert told(made, Gap("a", "b", (("x.py", "one"), ("y.py", "two")))) == (
        "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_the_nearest_is_kept() -> None:
    made = program(QWEN[:3])
    gap = Gap("p" * 500 + "PREFIX", "SUFFIX" + "s" * 500, (("x", "f" * 500),))
    text = told(made, gap, Room(60, 40))
    assert len(made.encode(text)) == 60
    files, rest = text.split("<|fim_prefix|>")
    before, after = rest.removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert before == "p" * 21 + "PREFIX" and after == "SUFFIX" + "s" * 4 and files == "f" * 20


@pytest.mark.parametrize("room", [1, 4, 7, 16, 33])
def test_no_room_is_exceeded(room: int) -> None:
    made = program(QWEN)
    gap = Gap("p" * 99, "s" * 99, tuple((str(at), "f" * at) for at in range(20)))
    assert len(made.encode_infill(gap, Room(room, room), True, None)) <= max(3, room)


def test_long_texts_are_not_encoded_whole() -> None:
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return list(range(len(text)))

    files = tuple(("x", "f" * 10**6) for _ in range(100))
    make_prompt(InfillTokens(0, 1, 2, 3, 4), Gap("p" * 10**6, "s" * 10**6, files), encode, (), Room(64, 32))
    assert max(seen) <= 32 * 64 and len(seen) < 10


def test_without_room_a_long_prompt_is_refused() -> None:
    made = program(QWEN)
    assert len(made.encode_infill(Gap("a" * 10, "b" * 10), None, True, 23)) == 23
    with pytest.raises(TooManyTokens):
        made.encode_infill(Gap("a" * 10, "b" * 11), None, True, 23)


def test_a_vocabulary_without_them() -> None:
    made = program([])
    assert made.marks is None and made.facts().infill is None
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens"):
        made.encode_infill(Gap("a", "b"), None, True, None)


def test_ordinary_tokens_are_no_marks() -> None:
    """HTML has <PRE>, and a vocabulary may have it as a word."""
    made = program(["<PRE>", "<SUF>", "<MID>"], kind=1)
    assert find_infill_tokens(made.backend, {}) is None


def test_sentencepiece_goes_on_without_a_blank() -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁", "a", "b", "▁a", "▁b"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    scores = [-float(at) for at in range(len(pieces) + 256)]
    made = LocalProgram.load(
        {
            K + "model": "llama",
            K + "tokens": pieces + bytes_,
            K + "scores": scores,
            K + "token_type": [2, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, *[6] * 256],
            K + "bos_token_id": 1,
            K + "eos_token_id": 2,
        }
    )
    ids = made.encode_infill(Gap("a", "b"), None, True, None)
    assert [pieces[id] for id in ids] == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]
