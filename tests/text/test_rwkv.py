"""RWKV's tokenizer against its definition: at each byte, the longest token that the text goes on with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.errors import InvalidModel
from penstock.text.program import LocalProgram
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tokenizers.vocabulary import Vocabulary
from penstock.text.tokenizers.write_folder import write_tokenizer

K = "tokenizer.ggml."
TEXTS = [
    *(
        "",
        "a",
        "abcab",
        "naïve café 東京 😀\n\n\tdef f(x):\r\n",
        "User: hi\n\nAssistant:",
        "\\n is no line break",
        "\x00\x7f",
    ),
    *("<s>", "a<s>b", "x<tool>y<tool>", "\uffff", "\uffffa", "Ċ Ġ", "'\"\\'", "é" * 50),
]


def naive(vocabulary: list[bytes], text: str) -> list[int]:
    """The definition, tried from the whole rest of the text downwards. Of equal tokens the last counts."""
    ids, rest = [], text.encode()
    known = {token: id for id, token in enumerate(vocabulary) if token}
    while rest:
        length = next(n for n in range(len(rest), 0, -1) if rest[:n] in known)
        ids.append(known[rest[:length]])
        rest = rest[length:]
    return ids


def escape(token: bytes) -> str:
    """As its converter writes them: Python's own notation for bytes."""
    return repr(token)[2:-1]


def words(seed: int, count: int = 300) -> list[bytes]:
    rng = random.Random(seed)
    text = "".join(TEXTS).encode() * 3 + "the quick brown fox 東京 naïve ".encode() * 3
    found = {text[at : at + rng.randint(2, 9)] for at in (rng.randrange(len(text) - 9) for _ in range(count))}
    return sorted(token for token in found if b"<s>" not in token and b"<tool>" not in token)


def describe(tokens: list[bytes], **more: Any) -> dict[str, Any]:
    """<s>, the tokens, an added one and a padding row, as llama.cpp's converter lays them out."""
    texts = ["<s>", *map(escape, tokens), "<tool>", f"[PAD{len(tokens) + 2}]"]
    kinds = [3, *[1] * len(tokens), 4, 5]
    metadata = {K + "model": "rwkv", K + "tokens": texts, K + "token_type": kinds, K + "bos_token_id": 0}
    return metadata | {K + key: value for key, value in more.items()}


@pytest.mark.parametrize("seed", range(4))
def test_it_is_its_definition(seed: int) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + words(seed)
    ours = Tokenizer.from_gguf(describe(tokens))
    vocabulary = [b"", *tokens]
    rng = random.Random(seed)
    pieces = [*TEXTS, " ", "the", "fox", "\n\n", "東", "ï"]
    for text in [*TEXTS, *("".join(rng.choices(pieces, k=30)) for _ in range(60))]:
        plain = text.replace("<s>", "").replace("<tool>", "")
        ids = ours.encode(plain)
        assert ids == naive(vocabulary, plain), plain
        assert ours.decode(ids) == plain
    assert ours.eos_token_ids == () and ours.bos_token_id == 0 and ours.special_ids == {0}


def test_added_tokens_cut_the_text() -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"b<", b"\n\n"]
    ours = Tokenizer.from_gguf(describe(tokens, eot_token_id=259))
    tool = len(tokens) + 1
    assert ours.encode("ab<tool>b<s>ab") == [257, tool, 99, 0, 257]
    assert ours.encode("b<to") == [258, *naive([b"", *tokens], "to")]
    assert ours.eos_token_ids == (259,) and ours.decode([257, 259, tool]) == "ab\n\n<tool>"
    assert ours.encode("\n\n\n") == [259, 11]
    assert ours.spellings()[259] == b"\n\n" and ours.spellings()[200] == bytes([199])


def test_a_message_spells_no_control_token() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    program = LocalProgram.load({**describe(tokens), "tokenizer.chat_template": "rwkv-world"})
    ids, text = program.encode_chat([{"role": "user", "content": " <s>hi "}], {})
    assert text == "User: <s>hi\n\nAssistant:"
    assert ids == naive([b"", *tokens], text)
    said = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
    assert program.render(said, {"add_generation_prompt": False}) == "System: s\n\nAssistant: a\n\n"


def test_unknown_bytes() -> None:
    """A token for them, or a vocabulary that has them all; a beginning of a token alone is unknown too."""
    some = describe([b"a", b"bc", "é".encode()])
    with pytest.raises(InvalidModel, match="model.gguf: no token is byte 0x00, and there is no unknown_token_id"):
        Tokenizer.from_gguf(some, "model.gguf")
    ours = Tokenizer.from_gguf({**some, K + "unknown_token_id": 0})
    assert ours.encode("abé" + "cabc") == [1, 0, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("\\x4", r"token '\\\\x4' ends in half an escape"),
        ("a\\", "ends in half an escape"),
        ("\\xg0", "lacks two hexadecimal digits"),
        ("é" * 600, "has 1200 bytes, and 1024 are possible"),
    ],
)
def test_damaged_tokens_are_refused(token: str, told: str) -> None:
    metadata = describe([bytes([byte]) for byte in range(256)])
    metadata[K + "tokens"][7] = token
    with pytest.raises(InvalidModel, match=f"model.gguf: .*{told}.*fetch it again") as refused:
        Tokenizer.from_gguf(metadata, "model.gguf")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_no_normal_token() -> None:
    with pytest.raises(InvalidModel, match="no token is a normal one"):
        Tokenizer.from_gguf(describe([]))


def test_escapes_of_any_case() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    metadata = describe(tokens)
    metadata[K + "tokens"][256] = "\\xFF"
    metadata[K + "tokens"][40] = "\\'"
    assert Tokenizer.from_gguf(metadata).spellings()[1:257] == tokens


def test_tokenizer_json_cannot_hold_it(tmp_path: Any) -> None:
    made = LocalProgram.load(describe([bytes([byte]) for byte in range(256)]))
    assert isinstance(made.vocabulary, Vocabulary)
    with pytest.raises(InvalidModel, match="cannot hold an RWKV tokenizer"):
        write_tokenizer(made.vocabulary, tmp_path)
