"""Deltas: never half a character, and their sum is the decode of all ids."""

from __future__ import annotations

import random

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from penstock.text.answers import Detokenizer
from penstock.text.program import LocalProgram
from penstock.text.tokenizers.decoding import byte_of_char
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tokenizers.vocabulary import Vocabulary

KINDS = ["bytes", "pieces", "prefixed pieces", "word pieces", "metaspace", "none"]
unicode = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
any_ids = st.lists(st.integers(0, 700) | st.integers(0, 2**33), max_size=40)


@pytest.fixture(scope="module")
def tokenizers(byte_level, train_sentencepiece, tmp_path_factory) -> dict[str, Tokenizer]:
    made = {"bytes": Tokenizer.of(LocalProgram(Vocabulary(byte_level, "test")))}
    for name, prefix in (("pieces", False), ("prefixed pieces", True)):
        folder = tmp_path_factory.mktemp("pieces")
        (folder / "tokenizer.model").write_bytes(
            train_sentencepiece(add_dummy_prefix=prefix, user_defined_symbols=["[TOOL]"])
        )
        made[name] = Tokenizer.from_folder(folder)
    for name, decoder in (("word pieces", decoders.WordPiece()), ("metaspace", decoders.Metaspace()), ("none", None)):
        made[name] = Tokenizer.of(LocalProgram(Vocabulary(word_pieces(decoder), "test")))
    assert [made[kind].spelling.decoder.kind for kind in KINDS] == ["bytes", "pieces", "pieces"] + ["pairs"] * 3
    return made


def word_pieces(decoder) -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoder
    backend.train_from_iterator(
        ["the ▁cat ▁sat on ▁the mat, don't it!"] * 3,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False),
    )
    return backend


def deltas(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, prompt)
    pushed = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pushed, detokenizer.finish()]


def test_bytes_are_written_as_the_library_writes_them():
    assert set(byte_of_char()) == set(ByteLevel.alphabet())
    assert sorted(byte_of_char().values()) == list(range(256))


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids, skip=st.booleans(), size=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_sum_of_deltas_is_the_decode_of_all_ids(tokenizers, kind, ids, skip, size):
    assert "".join(deltas(tokenizers[kind], ids, skip, [], size)) == tokenizers[kind].decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=any_ids, ids=any_ids, skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_text_after_a_prompt_is_what_the_ids_add_to_it(tokenizers, kind, prompt, ids, skip):
    begun = Detokenizer(tokenizers[kind], skip).push(prompt)
    assert begun + "".join(deltas(tokenizers[kind], ids, skip, prompt)) == tokenizers[kind].decode(prompt + ids, skip)


@pytest.mark.parametrize("kind", KINDS[:3])
@given(text=unicode)
@settings(max_examples=100, deadline=None)
def test_every_delta_of_encoded_text_is_whole_characters(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    text = text.replace("\u2581", " ").replace("\ufffd", "?")  # a piece's space, and the mark of half a character
    parts = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False), False, [])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["bytes", "word pieces", "metaspace", "none"])
@given(ids=any_ids, skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_decode_equals_the_librarys(tokenizers, kind, ids, skip):
    tokenizer = tokenizers[kind]
    backend, known = tokenizer._backend, [id for id in ids if id < 2**32]
    assert tokenizer.decode(ids, skip) == backend.decode(known, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def sentencepiece_model(train_sentencepiece):
    return sentencepiece.SentencePieceProcessor(
        model_proto=train_sentencepiece(add_dummy_prefix=True, user_defined_symbols=["[TOOL]"])
    )


@given(ids=st.lists(st.integers(3, 700), max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_decode_as_sentencepiece_does(tokenizers, sentencepiece_model, ids):
    """But for a byte token of a space at the very start, which loses the space as in the `tokenizers` library."""
    known = [id for id in ids if id < sentencepiece_model.vocab_size()]
    assume(not known or sentencepiece_model.id_to_piece(known[0]) != "<0x20>")
    assert tokenizers["prefixed pieces"].decode(ids) == sentencepiece_model.decode(known)


def test_a_character_in_many_tokens_comes_at_once(tokenizers):
    ids = tokenizers["bytes"].encode("\U00040000", add_special_tokens=False)
    assert len(ids) == 4
    assert deltas(tokenizers["bytes"], ids, True, []) == ["", "", "", "\U00040000", ""]
    assert deltas(tokenizers["bytes"], ids[2:], True, ids[:2]) == ["", "\U00040000", ""]
    assert deltas(tokenizers["bytes"], ids[:3], True, []) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_id_by_itself_gives_the_same_text(tokenizers, kind):
    """Characters cut in two included: whatever waits is completed either way."""
    tokenizer = tokenizers[kind]
    one, many = Detokenizer(tokenizer), Detokenizer(tokenizer)
    source = random.Random(0)
    halves = tokenizer.encode("\U00040000ä", add_special_tokens=False)
    for id in [source.choice([source.randrange(700), *halves]) for _ in range(3000)]:
        assert one.push_one(id) == many.push((id,))
    assert one.finish() == many.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_long_prompt_only_the_end_is_read(tokenizers, kind):
    spelling = tokenizers[kind].spelling
    word = next(id for id in range(5, 700) if len(spelling[id]) > 2)
    assert spelling.tail([word] * 100_000, frozenset()) == [word]
    assert len(spelling.tail([2**40] * 50 + [word] * 50 + [0], frozenset({0}))) == 1


def test_special_tokens_are_shown_on_request_only(tokenizers):
    ids = tokenizers["bytes"].encode("a<|im_end|>b[TOOL]", add_special_tokens=False)
    assert tokenizers["bytes"].decode(ids) == "ab[TOOL]"
    assert tokenizers["bytes"].decode(ids, skip_special_tokens=False) == "a<|im_end|>b[TOOL]"


def test_a_word_after_a_prompt_keeps_its_space(tokenizers):
    pieces = tokenizers["prefixed pieces"]
    prompt, ids = pieces.encode("the"), pieces.encode("cat", add_special_tokens=False)
    assert pieces.decode(ids) == "cat"
    assert "".join(deltas(pieces, ids, True, prompt)) == " cat"


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_is_looked_at_a_fixed_number_of_times(tokenizers, kind, monkeypatch):
    """However long the text is already: no window that grows, no second decode of the past."""
    tokenizer = tokenizers[kind]
    num_looks, lengths = 0, set()
    spelling, decode = tokenizer.spelling, tokenizer._backend.decode

    class Counting:
        decoder, backend = spelling.decoder, None

        def __getitem__(self, id):
            nonlocal num_looks
            num_looks += 1
            return spelling[id]

    class Watched:
        def decode(self, ids, **options):
            lengths.add(len(ids))
            return decode(ids, **options)

    counting = Counting()
    counting.backend = Watched()
    stream = type(spelling.stream())(counting)
    for id in range(2000):
        stream.push([id % 199])
    assert num_looks == 2000
    assert max(lengths, default=0) <= 2
