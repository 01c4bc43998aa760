"""SentencePiece's own file, `tokenizer.model`: a protocol-buffer message, read without that library."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, normalizers

from penstock.errors import InvalidModel
from penstock.regular import read_regular
from penstock.text import spm
from penstock.text.vocabulary import REMEDY

MAX_FILE_BYTES = 1 << 28
# field numbers of sentencepiece_model.proto
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_KIND, _BOS, _EOS = 3, 41, 42
_CHARSMAP, _DUMMY_PREFIX, _SINGLE_SPACES, _ESCAPE = 2, 3, 4, 5
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

Field = tuple[int, "int | bytes"]


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read ({error}); {REMEDY}") from None


def read_model(path: Path) -> tuple[spm.Pieces, int, int]:
    """The pieces and the ids of bos and eos (-1: none)."""
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    for number, value in _fields(_bytes_of(path), path):
        if number == _PIECES and isinstance(value, bytes):
            piece = dict(_fields(value, path))
            texts.append(_bytes(piece.get(_TEXT, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(_SCORE, bytes(4))))[0])
            kinds.append(_int(piece.get(_KIND, spm.NORMAL)))
        elif number == _TRAINER and isinstance(value, bytes):
            trainer = dict(_fields(value, path))
        elif number == _NORMALIZER and isinstance(value, bytes):
            rules = dict(_fields(value, path))
    if not texts:
        raise InvalidModel(f"{path} holds no pieces; download the model again")
    kind = _KINDS.get(_int(trainer.get(_MODEL_KIND, 1)), "unknown")
    if kind != "bpe" or not rules.get(_ESCAPE, 1):
        raise InvalidModel(
            f"{path} is a SentencePiece model of kind {kind}; only bpe with escaped spaces is read: "
            "save the tokenizer as tokenizer.json (transformers' save_pretrained does)"
        )
    unknown = [id for id, piece_kind in enumerate(kinds) if piece_kind == spm.UNKNOWN]
    pieces = spm.Pieces(
        texts=spm.raw_texts(texts, kinds),
        scores=scores,
        kinds=kinds,
        unknown=unknown[0] if unknown else None,
        add_space_prefix=bool(rules.get(_DUMMY_PREFIX, 1)),
        normalizer=_normalizer(rules),
    )
    return pieces, _int(trainer.get(_BOS, 1)), _int(trainer.get(_EOS, 2))


def _normalizer(rules: dict[int, int | bytes]) -> normalizers.Normalizer | None:
    steps: list[normalizers.Normalizer] = []
    charsmap = rules.get(_CHARSMAP, b"")
    if charsmap:
        steps.append(normalizers.Precompiled(_bytes(charsmap)))
    if rules.get(_SINGLE_SPACES, 1):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps) if steps else None


def _fields(data: bytes, path: Path) -> Iterator[Field]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at, path)
            yield number, value
            continue
        size, at = _varint(data, at, path) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), at)
        if size < 0 or at + size > len(data):
            raise InvalidModel(f"{path} is truncated or no SentencePiece model (byte {at}); download the model again")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise InvalidModel(f"{path} is truncated or no SentencePiece model (byte {at}); download the model again")


def _int(value: int | bytes) -> int:
    """An enum or a 32-bit integer: negative ones are written as 64 bits of two's complement."""
    if isinstance(value, bytes):
        raise ValueError("bytes where a number was expected")
    return value - 2**64 if value >= 2**63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes were expected")
    return value
