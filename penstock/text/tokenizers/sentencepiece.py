"""SentencePiece: BPE, whose merges follow from scores, and unigram; `tokenizer.model` without that library."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from penstock.errors import InvalidModel
from penstock.host.files import read_regular
from penstock.text.tokenizers.decoding import BYTE_TOKEN
from penstock.text.tokenizers.vocabulary import REMEDY, add_tokens

SPACE = "\u2581"  # a space, as pieces write it
MAX_PIECE_CHARS = 1024
NAMELESS = "\ue000\ue001"  # begins the text of rows that have none; no text has it

# kinds of piece, numbered alike in SentencePiece and GGUF files
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: int | None = None
    add_space_prefix: bool = True
    normalizer: normalizers.Normalizer | None = None  # before spaces are escaped
    rstrip: frozenset[str] = frozenset()  # tokens that absorb the space after them
    merges: Sequence[tuple[str, str]] | None = None  # best first; None: derive from scores
    is_unigram: bool = False  # the pieces whose scores have the largest sum, instead of merges

    def of_kind(self, *kinds: int) -> list[int]:
        return [id for id, kind in enumerate(self.kinds) if kind in kinds and self.texts[id]]


def raw_texts(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Unescape spaces of user-defined pieces, which match raw text, unless such a token exists."""
    known = set(texts)
    plain = {text: text.replace(SPACE, " ") for text, kind in zip(texts, kinds) if kind == USER_DEFINED}
    return [
        plain[text] if kind == USER_DEFINED and plain[text] not in known else text for text, kind in zip(texts, kinds)
    ]


def merges_of(texts: Sequence[str], scores: Sequence[float], origin: str) -> list[tuple[str, str]]:
    """Return all ways to make a piece from two others, best first.

    SentencePiece merges the pair whose union scores highest, leftmost on ties; merge ranks know no position. On equal
    scores (the halvings of one piece; Llama's runs of spaces) the longer left half goes first, so that the left part
    grows before a new one begins on its right.
    """
    longest = max(map(len, texts), default=0)
    if longest > MAX_PIECE_CHARS:
        raise InvalidModel(f"{origin}: a token of {longest} characters; the limit is {MAX_PIECE_CHARS}")
    known = set(texts)
    order = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
    pieces = [texts[id] for id in order]
    merges: list[tuple[str, str]] = []
    done = 0
    for begin, end in _ties([scores[id] for id in order]):
        merges += _halvings(pieces[done:begin], known)
        merges += sorted(_halvings(pieces[begin:end], known), key=lambda pair: -len(pair[0]))
        done = end
    return merges + _halvings(pieces[done:], known)


def _ties(values: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield ranges of two or more equal neighbours."""
    end = 0
    for at in range(1, len(values)):
        if at >= end and values[at] == values[at - 1]:
            end = next((i for i in range(at, len(values)) if values[i] != values[at]), len(values))
            yield at - 1, end


def _halvings(pieces: Sequence[str], known: set[str]) -> list[tuple[str, str]]:
    """Return the splits of each piece into two pieces. The right half is looked up first: it is missing more often."""
    return [
        (left, right)
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if (right := piece[cut:]) in known and (left := piece[:cut]) in known
    ]


def _has_bytes(pieces: Pieces) -> bool:
    return any(BYTE_TOKEN.fullmatch(pieces.texts[id]) for id in pieces.of_kind(BYTE))


def _build_bpe(pieces: Pieces, origin: str) -> BPE:
    ids = {text: id for id, text in enumerate(pieces.texts) if text}
    merges = pieces.merges
    if merges is None:
        merging = pieces.of_kind(0, NORMAL, UNUSED)
        merges = merges_of([pieces.texts[id] for id in merging], [pieces.scores[id] for id in merging], origin)
    unknown = None if pieces.unknown is None else pieces.texts[pieces.unknown]
    has_bytes = _has_bytes(pieces)
    return BPE(vocab=ids, merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)


def _build_unigram(pieces: Pieces) -> Unigram:
    """An unknown character costs 10 more than the worst ordinary piece, so the others must not be worse than that."""
    worst = min((pieces.scores[id] for id in pieces.of_kind(0, NORMAL, UNUSED)), default=0.0)
    scored = [
        (text or f"{NAMELESS}{id}", max(score, worst))
        for id, (text, score) in enumerate(zip(pieces.texts, pieces.scores))
    ]
    return Unigram(scored, unk_id=pieces.unknown, byte_fallback=_has_bytes(pieces))


def build(pieces: Pieces, origin: str) -> Backend:
    """Build a backend. Only ordinary pieces are made; control and user-defined tokens match the raw text first."""
    backend = Backend(_build_unigram(pieces) if pieces.is_unigram else _build_bpe(pieces, origin))
    steps = [pieces.normalizer] if pieces.normalizer else []
    steps += [normalizers.Prepend(SPACE)] if pieces.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(undo + [decoders.Strip(" ", 1, 0)] if pieces.add_space_prefix else undo)
    add_tokens(
        backend,
        special=[pieces.texts[id] for id in pieces.of_kind(UNKNOWN, CONTROL)],
        plain=[pieces.texts[id] for id in pieces.of_kind(USER_DEFINED)],
        rstrip=pieces.rstrip,
    )
    return backend


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


def read_model(path: Path) -> tuple[Pieces, int, int]:
    """Return the pieces and the ids of bos and eos (-1: none)."""
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
            kinds.append(_int(piece.get(_KIND, NORMAL)))
        elif number == _TRAINER and isinstance(value, bytes):
            trainer = dict(_fields(value, path))
        elif number == _NORMALIZER and isinstance(value, bytes):
            rules = dict(_fields(value, path))
    if not texts:
        raise InvalidModel(f"{path} holds no pieces; download the model again")
    kind = _KINDS.get(_int(trainer.get(_MODEL_KIND, 1)), "unknown")
    if kind not in ("bpe", "unigram") or not rules.get(_ESCAPE, 1):
        raise InvalidModel(
            f"{path} is a SentencePiece model of kind {kind}; bpe and unigram with escaped spaces are supported: "
            "save the tokenizer as tokenizer.json (transformers' save_pretrained does)"
        )
    unknown = [id for id, piece_kind in enumerate(kinds) if piece_kind == UNKNOWN]
    pieces = Pieces(
        texts=raw_texts(texts, kinds),
        scores=scores,
        kinds=kinds,
        unknown=unknown[0] if unknown else None,
        add_space_prefix=bool(rules.get(_DUMMY_PREFIX, 1)),
        normalizer=make_normalizer(_bytes(rules.get(_CHARSMAP, b"")), bool(rules.get(_SINGLE_SPACES, 1))),
        is_unigram=kind == "unigram",
    )
    return pieces, _int(trainer.get(_BOS, 1)), _int(trainer.get(_EOS, 2))


def make_normalizer(charsmap: bytes, single_spaces: bool) -> normalizers.Normalizer | None:
    """Rewrite characters by a compiled map; drop spaces at both ends, and all but one elsewhere."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if single_spaces:
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
    """Read an enum or 32-bit integer; negative ones are 64-bit two's complement."""
    if isinstance(value, bytes):
        raise ValueError("bytes where a number was expected")
    return value - 2**64 if value >= 2**63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes were expected")
    return value
