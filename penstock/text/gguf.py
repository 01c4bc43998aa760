"""The tokenizer that a GGUF file carries in its metadata.

Kinds: `gpt2` (byte-level BPE, split as `tokenizer.ggml.pre` names), `llama` (SentencePiece BPE), `gemma4` (pieces like
SentencePiece's with merges of their own; some names of `pre` mean it, too) and `bert` (WordPiece). An unknown split is
refused: with a near one the model would read other tokens than it was trained on. Files from before splits were named
(no `pre`, or `default`) get the one their architecture's published models use, else GPT-2's.

What ends an answer: the ids the file names as end of sequence, of turn and of message, and any control token that is
a known end of turn (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>` …) and is written by the file's own chat template.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from penstock.errors import InvalidModel
from penstock.text import spm, wordpiece
from penstock.text.metadata import KEY, Metadata
from penstock.text.splits import BY_ARCHITECTURE, SPLITTINGS, Splitting
from penstock.text.vocabulary import REMEDY, TURN_ENDS, Vocabulary, add_tokens, refusing

MERGED_PIECES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})  # names of `pre`
_log = logging.getLogger(__name__)


def read_vocabulary(metadata: Mapping[str, Any], origin: str = "GGUF file") -> Vocabulary:
    source = Metadata(metadata, origin)
    kind = source.text("model")
    if kind is None:
        raise InvalidModel(
            f"{origin} carries no tokenizer (no {KEY}model); use a file that has one, or pass "
            "skip_tokenizer_init=True and prompts as token ids"
        )
    if kind == "gpt2" and source.text("pre") in MERGED_PIECES:
        kind = "gemma4"
    if kind not in READERS:
        raise InvalidModel(
            f"{origin}: {KEY}model={kind!r} is not supported (known: {', '.join(READERS)}); use the "
            "model's safetensors folder with its tokenizer.json, or skip_tokenizer_init=True with token "
            "ids"
        )
    with refusing(origin):
        return READERS[kind](source)


def _vocabulary(
    source: Metadata,
    backend: Backend,
    add_bos: bool,
    bos: int | None = None,
    eos: int | None = None,
    sep: int | None = None,
) -> Vocabulary:
    """Around a prompt stand bos and eos as the file's flags say, and `sep` always."""
    templates = source.templates()
    bos, eos = _first(source.id("bos_token_id"), bos), _first(source.id("eos_token_id"), eos)
    ids = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": source.id("unknown_token_id"),
        "pad_token": source.id("padding_token_id"),
    }
    prefix = (bos,) if bos is not None and source.flag("add_bos_token", add_bos) else ()
    suffix = (eos,) if eos is not None and source.flag("add_eos_token", False) else ()
    suffix = suffix if sep is None else (sep,)
    ends = [eos, source.id("eot_token_id"), source.id("eom_token_id"), *_turn_ends(source, templates)]
    last = {text: id for id, text in enumerate(source.texts)}
    return Vocabulary(
        backend=backend,
        origin=source.origin,
        num_ids=len(source.texts),
        eos_token_ids=tuple(dict.fromkeys(id for id in ends if id is not None)),
        bos_token_id=bos,
        named={name: source.texts[id] for name, id in ids.items() if id is not None},
        templates=templates,
        affixes=(prefix, suffix),
        infill=_infill(source),
        aliases={id: last[text] for id, text in enumerate(source.texts) if last[text] != id and text},
    )


def _infill(source: Metadata) -> dict[str, int]:
    """By their present names or, three of them, by older ones."""
    older = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
    found = {
        name: _first(source.id(f"fim_{name}_token_id"), source.id(f"{older.get(name, 'fim_' + name)}_token_id"))
        for name in ("pre", "suf", "mid", "pad", "rep", "sep")
    }
    return {name: id for name, id in found.items() if id is not None}


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _turn_ends(source: Metadata, templates: Mapping[str, str]) -> list[int]:
    return [
        id
        for id in source.of_kind(spm.CONTROL)
        if source.texts[id] in TURN_ENDS and any(source.texts[id] in text for text in templates.values())
    ]


def _sentencepiece(source: Metadata) -> Vocabulary:
    num = len(source.texts)
    scores: Sequence[float] = source.array("scores", float, num) or range(0, -num, -1)
    if not all(map(math.isfinite, scores)):
        raise InvalidModel(f"{source.origin}: {KEY}scores must be finite numbers; {REMEDY}")
    rstrip: frozenset[str] = frozenset()
    if source.architecture == "phi3":  # its tokenizer swallows the line break after a role
        rstrip = frozenset(source.texts[id] for id in source.of_kind(spm.CONTROL, spm.USER_DEFINED))
        rstrip -= {"<s>", "<|endoftext|>"}
    unknown = _first(source.id("unknown_token_id"), *source.of_kind(spm.UNKNOWN))
    source.texts = spm.raw_texts(source.texts, source.kinds)
    pieces = spm.Pieces(
        texts=source.texts,
        scores=scores,
        kinds=source.kinds,
        unknown=unknown if unknown is not None and source.texts[unknown] else None,
        add_space_prefix=source.flag("add_space_prefix", True),
        rstrip=rstrip,
    )
    backend = spm.build(pieces, source.origin)
    add_tokens(backend, special=source.special(), plain=[])
    bos, eos = (id if id in source.of_kind(spm.CONTROL) else None for id in (1, 2))  # SentencePiece's own places
    return _vocabulary(source, backend, add_bos=True, bos=bos, eos=eos)


def _byte_level(source: Metadata) -> Vocabulary:
    splitting = _splitting(source)
    ids = {text: id for id, text in enumerate(source.texts) if text}
    backend = Backend(BPE(vocab=ids, merges=_merges(source, ids), ignore_merges=splitting.whole_words))
    backend.normalizer = normalizers.NFC() if splitting.compose else None
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, special=source.special(), plain=[source.texts[id] for id in source.of_kind(spm.USER_DEFINED)])
    return _vocabulary(source, backend, add_bos=splitting.add_bos)


def _merges(source: Metadata, known: Container[str]) -> list[tuple[str, str]]:
    """Those of known tokens."""
    merges = []
    for merge in source.array("merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not right:
            raise InvalidModel(f"{source.origin}: {KEY}merges has {merge[:40]!r}, which is not a pair; {REMEDY}")
        if left in known and right in known and left + right in known:
            merges.append((left, right))
    return merges


def _merged_pieces(source: Metadata) -> Vocabulary:
    """Runs of line breaks are tokens whole, which no merge may make."""
    pieces = spm.Pieces(
        texts=source.texts,
        scores=[],
        kinds=source.kinds,
        unknown=source.id("unknown_token_id"),
        add_space_prefix=False,
        merges=_merges(source, set(source.texts)),
    )
    backend = spm.build(pieces, source.origin)
    breaks = [text for text in source.texts if len(text) > 1 and not text.strip("\n")]
    add_tokens(backend, special=source.special(), plain=breaks)
    return _vocabulary(source, backend, add_bos=True)


def _wordpiece(source: Metadata) -> Vocabulary:
    names = {
        name: _first(source.id(f"{key}_token_id"), *source.ids_of(f"[{name}]"))
        for name, key in (("CLS", "cls"), ("SEP", "seperator"), ("UNK", "unknown"))
    }
    source.texts = wordpiece.prefixed(source.texts, source.kinds)
    is_lower = source.flag("normalizer.lowercase", not wordpiece.has_capitals(source.texts))
    unknown = names["UNK"]
    backend = wordpiece.build(
        source.texts,
        None if unknown is None else source.texts[unknown],
        is_lower,
        source.flag("normalizer.strip_accents", is_lower),
    )
    add_tokens(backend, special=source.special(), plain=[])
    return _vocabulary(source, backend, add_bos=True, bos=names["CLS"], sep=names["SEP"])


def _splitting(source: Metadata) -> Splitting:
    name = source.text("pre")
    if name in (None, "", "default"):
        name = BY_ARCHITECTURE.get(source.architecture or "", "gpt-2")
        if "<|begin_of_text|>" in source.texts and source.architecture == "llama":
            name = "llama-bpe"
        _log.warning("%s does not say how its tokenizer splits text (%spre); taking %r", source.origin, KEY, name)
    if name not in SPLITTINGS:
        raise InvalidModel(
            f"{source.origin}: {KEY}pre={name!r} is unknown (known: {', '.join(sorted(SPLITTINGS))}); "
            "use the model's safetensors folder with its tokenizer.json, or skip_tokenizer_init=True "
            "with token ids"
        )
    return SPLITTINGS[name]


READERS: dict[str, Callable[[Metadata], Vocabulary]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _merged_pieces,
    "bert": _wordpiece,
}
