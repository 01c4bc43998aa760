"""SentencePiece BPE from its pieces: the merges that its scores imply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from penstock.errors import InvalidModel
from penstock.text.decoding import BYTE_TOKEN
from penstock.text.vocabulary import add_tokens

SPACE = "\u2581"  # how pieces write a space
MAX_PIECE_CHARS = 1024

# kinds of piece, numbered alike in SentencePiece and GGUF files
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Pieces:
    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: int | None = None
    add_space_prefix: bool = True
    normalizer: normalizers.Normalizer | None = None  # before spaces are written as pieces write them
    rstrip: frozenset[str] = frozenset()  # tokens that swallow the space after them
    merges: Sequence[tuple[str, str]] | None = None  # best first; None: as the scores imply

    def of_kind(self, *kinds: int) -> list[int]:
        return [id for id, kind in enumerate(self.kinds) if kind in kinds and self.texts[id]]


def raw_texts(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """User-defined pieces are matched in raw text, so their spaces are spaces; unless such a token exists already."""
    known = set(texts)
    plain = {text: text.replace(SPACE, " ") for text, kind in zip(texts, kinds) if kind == USER_DEFINED}
    return [
        plain[text] if kind == USER_DEFINED and plain[text] not in known else text for text, kind in zip(texts, kinds)
    ]


def merges_of(texts: Sequence[str], scores: Sequence[float], origin: str) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best first.

    SentencePiece merges the pair whose union scores highest, the leftmost first among equals; ranks know no place in
    the text. Where scores are equal (the halvings of one piece; Llama's runs of spaces, which all have one score) the
    longer left half goes first: what has grown on the left grows on before anything begins on its right.
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
    """Where two or more equal values stand next to each other."""
    end = 0
    for at in range(1, len(values)):
        if at >= end and values[at] == values[at - 1]:
            end = next((i for i in range(at, len(values)) if values[i] != values[at]), len(values))
            yield at - 1, end


def _halvings(pieces: Sequence[str], known: set[str]) -> list[tuple[str, str]]:
    """The right half is looked up first: it is the one that more often is no piece."""
    return [
        (left, right)
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if (right := piece[cut:]) in known and (left := piece[:cut]) in known
    ]


def build(pieces: Pieces, origin: str) -> Backend:
    """Only ordinary pieces merge; control and user-defined tokens are recognised in the raw text before."""
    ids = {text: id for id, text in enumerate(pieces.texts) if text}
    merges = pieces.merges
    if merges is None:
        merging = pieces.of_kind(0, NORMAL, UNUSED)
        merges = merges_of([pieces.texts[id] for id in merging], [pieces.scores[id] for id in merging], origin)
    unknown = None if pieces.unknown is None else pieces.texts[pieces.unknown]
    has_bytes = any(BYTE_TOKEN.fullmatch(pieces.texts[id]) for id in pieces.of_kind(BYTE))
    backend = Backend(BPE(vocab=ids, merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
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
