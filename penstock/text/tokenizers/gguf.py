"""Read the tokenizer in a GGUF file's metadata.

Kinds: `gpt2` (byte-level BPE, pre-tokenizer named by `tokenizer.ggml.pre`), `llama` (SentencePiece BPE), `gemma4`
(SentencePiece-like pieces with explicit merges; also meant by some names of `pre`), `bert` (WordPiece), `t5`
(SentencePiece unigram) and `rwkv` (the longest token that matches). An unknown
pre-tokenizer is refused: a similar one would give other tokens than in training. Older files (no `pre`, or `default`)
get that of their architecture's published models, else GPT-2's.

End ids: those the file names as end of sequence, turn and message, and any known end-of-turn token (`<|im_end|>`,
`<|eot_id|>`, `<end_of_turn>` …) that the file's chat template writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from penstock.errors import InvalidModel, quote
from penstock.text.tokenizers import rwkv, sentencepiece, wordpiece
from penstock.text.tokenizers.pre_tokenizers import BY_ARCHITECTURE, SPLITTINGS, Splitting
from penstock.text.tokenizers.vocabulary import REMEDY, TURN_ENDS, Vocabulary, add_tokens, refuse_damage

KEY = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
NAMED = ("bos", "eos", "eot", "eom", "cls", "seperator", "mask")  # as the format spells them


class TokenizerMetadata:
    """Tokenizer keys, type-checked before use."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin
        self.texts = self.array("tokens", str)
        if not self.texts:
            raise InvalidModel(f"{origin}: {KEY}tokens is missing or empty; {REMEDY}")
        self.kinds = self.array("token_type", int, len(self.texts)) or [sentencepiece.NORMAL] * len(self.texts)
        for id in self.of_kind(sentencepiece.UNUSED):  # padding rows of the embedding
            if self.texts[id] == f"[PAD{id}]":
                self.texts[id] = ""

    def _value(self, key: str, kind: type, name: str) -> Any:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) and kind is int):
            raise InvalidModel(f"{self.origin}: {key}={str(value)[:40]!r} must be {name}; {REMEDY}")
        return value

    def text(self, key: str) -> str | None:
        return cast("str | None", self._value(KEY + key, str, "a string"))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(KEY + key, bool, "true or false")
        return default if value is None else value

    def id(self, key: str) -> int | None:
        """Return a token id; None if absent or outside the vocabulary."""
        value = self._value(KEY + key, int, "a token id")
        return value if value is not None and 0 <= value < len(self.texts) else None

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self._value(KEY + key, (list, tuple), "a list") or []  # type: ignore[arg-type]
        if not set(map(type, values)) <= {kind}:
            raise InvalidModel(f"{self.origin}: {KEY}{key} must hold only {kind.__name__} values; {REMEDY}")
        if values and length is not None and len(values) != length:
            raise InvalidModel(f"{self.origin}: {KEY}{key} has {len(values)} entries for {length} tokens; {REMEDY}")
        return list(values)

    def of_kind(self, *kinds: int) -> list[int]:
        return [id for id, kind in enumerate(self.kinds) if kind in kinds]

    def ids_of(self, text: str) -> list[int]:
        return [id for id, other in enumerate(self.texts) if other == text]

    def special(self) -> list[str]:
        """Return control tokens and the tokens the file names as begin and end."""
        named = [self.id(f"{name}_token_id") for name in NAMED]
        ids = self.of_kind(sentencepiece.UNKNOWN, sentencepiece.CONTROL) + [id for id in named if id is not None]
        return [self.texts[id] for id in dict.fromkeys(ids)]

    @property
    def architecture(self) -> str | None:
        return cast("str | None", self._value("general.architecture", str, "a string"))

    def templates(self) -> dict[str, str]:
        found = {}
        for key in self.values:
            if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + "."):
                text = self._value(key, str, "a string") or ""
                if "{" not in text and text != rwkv.TEMPLATE_NAME:  # a name that another program gives a template
                    _log.warning("%s: %s=%s is no Jinja template, and is left out", self.origin, key, quote(text))
                    continue
                found[key[len(TEMPLATE_KEY) + 1 :] or "default"] = rwkv.TEMPLATE if text == rwkv.TEMPLATE_NAME else text
        return found


MERGED_PIECES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})  # values of `pre`
_log = logging.getLogger(__name__)


def read_vocabulary(metadata: Mapping[str, Any], origin: str = "GGUF file") -> Vocabulary:
    source = TokenizerMetadata(metadata, origin)
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
    with refuse_damage(origin):
        return READERS[kind](source)


def _vocabulary(
    source: TokenizerMetadata,
    backend: Backend,
    add_bos: bool,
    bos: int | None = None,
    eos: int | None = None,
    sep: int | None = None,
    add_eos: bool = False,
) -> Vocabulary:
    """Build a vocabulary; bos and eos surround a prompt as the file's flags say, `sep` always."""
    templates = source.templates()
    bos, eos = _first(source.id("bos_token_id"), bos), _first(source.id("eos_token_id"), eos)
    ids = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": source.id("unknown_token_id"),
        "pad_token": source.id("padding_token_id"),
    }
    prefix = (bos,) if bos is not None and source.flag("add_bos_token", add_bos) else ()
    suffix = (eos,) if eos is not None and source.flag("add_eos_token", add_eos) else ()
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


def _infill(source: TokenizerMetadata) -> dict[str, int]:
    """Return FIM ids by their present names or, for three of them, older ones."""
    older = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
    found = {
        name: _first(source.id(f"fim_{name}_token_id"), source.id(f"{older.get(name, 'fim_' + name)}_token_id"))
        for name in ("pre", "suf", "mid", "pad", "rep", "sep")
    }
    return {name: id for name, id in found.items() if id is not None}


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _turn_ends(source: TokenizerMetadata, templates: Mapping[str, str]) -> list[int]:
    return [
        id
        for id in source.of_kind(sentencepiece.CONTROL)
        if source.texts[id] in TURN_ENDS and any(source.texts[id] in text for text in templates.values())
    ]


def _scores(source: TokenizerMetadata) -> Sequence[float]:
    num = len(source.texts)
    scores: Sequence[float] = source.array("scores", float, num) or range(0, -num, -1)
    if not all(map(math.isfinite, scores)):
        raise InvalidModel(f"{source.origin}: {KEY}scores must be finite numbers; {REMEDY}")
    return scores


def _unigram(source: TokenizerMetadata) -> Vocabulary:
    """Read SentencePiece's unigram, as T5 and XLM-RoBERTa have it."""
    charsmap = source.array("precompiled_charsmap", int)
    if any(not 0 <= each < 256 for each in charsmap):
        raise InvalidModel(f"{source.origin}: {KEY}precompiled_charsmap must hold bytes; {REMEDY}")
    source.texts = sentencepiece.raw_texts(source.texts, source.kinds)
    pieces = sentencepiece.Pieces(
        texts=source.texts,
        scores=_scores(source),
        kinds=source.kinds,
        unknown=_first(source.id("unknown_token_id"), *source.of_kind(sentencepiece.UNKNOWN)),
        add_space_prefix=source.flag("add_space_prefix", True),
        normalizer=sentencepiece.make_normalizer(bytes(charsmap), source.flag("remove_extra_whitespaces", True)),
        is_unigram=True,
    )
    backend = sentencepiece.build(pieces, source.origin)
    add_tokens(backend, special=source.special(), plain=[])
    return _vocabulary(source, backend, add_bos=False, add_eos=True)


def _sentencepiece(source: TokenizerMetadata) -> Vocabulary:
    scores = _scores(source)
    rstrip: frozenset[str] = frozenset()
    if source.architecture == "phi3":  # its tokenizer drops the line break after a role
        rstrip = frozenset(source.texts[id] for id in source.of_kind(sentencepiece.CONTROL, sentencepiece.USER_DEFINED))
        rstrip -= {"<s>", "<|endoftext|>"}
    unknown = _first(source.id("unknown_token_id"), *source.of_kind(sentencepiece.UNKNOWN))
    source.texts = sentencepiece.raw_texts(source.texts, source.kinds)
    pieces = sentencepiece.Pieces(
        texts=source.texts,
        scores=scores,
        kinds=source.kinds,
        unknown=unknown if unknown is not None and source.texts[unknown] else None,
        add_space_prefix=source.flag("add_space_prefix", True),
        rstrip=rstrip,
    )
    backend = sentencepiece.build(pieces, source.origin)
    add_tokens(backend, special=source.special(), plain=[])
    bos, eos = (
        id if id in source.of_kind(sentencepiece.CONTROL) else None for id in (1, 2)
    )  # SentencePiece's defaults
    return _vocabulary(source, backend, add_bos=True, bos=bos, eos=eos)


def _byte_level(source: TokenizerMetadata) -> Vocabulary:
    splitting = _find_pre_tokenizer(source)
    ids = {text: id for id, text in enumerate(source.texts) if text}
    backend = Backend(BPE(vocab=ids, merges=_merges(source, ids), ignore_merges=splitting.whole_words))
    backend.normalizer = normalizers.NFC() if splitting.compose else None
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    add_tokens(
        backend, special=source.special(), plain=[source.texts[id] for id in source.of_kind(sentencepiece.USER_DEFINED)]
    )
    return _vocabulary(source, backend, add_bos=splitting.add_bos)


def _greedy(source: TokenizerMetadata) -> Vocabulary:
    """Read RWKV's tokens: escaped bytes, but for control and added ones, which are texts."""
    normal = source.of_kind(sentencepiece.NORMAL, sentencepiece.BYTE)
    for id in normal:
        source.texts[id] = rwkv.spell(rwkv.unescape(source.texts[id], source.origin))
    backend, matcher = rwkv.build(source.texts, source.id("unknown_token_id"), normal, source.origin)
    special = source.of_kind(sentencepiece.UNKNOWN, sentencepiece.CONTROL)  # an end of turn may be a normal token
    plain = source.of_kind(sentencepiece.USER_DEFINED)
    add_tokens(backend, [source.texts[id] for id in special], [source.texts[id] for id in plain])
    return replace(_vocabulary(source, backend, add_bos=False), matcher=matcher)


def _merges(source: TokenizerMetadata, known: Container[str]) -> list[tuple[str, str]]:
    """Return the merges of known tokens."""
    merges = []
    for merge in source.array("merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not right:
            raise InvalidModel(f"{source.origin}: {KEY}merges has {merge[:40]!r}, which is not a pair; {REMEDY}")
        if left in known and right in known and left + right in known:
            merges.append((left, right))
    return merges


def _merged_pieces(source: TokenizerMetadata) -> Vocabulary:
    """Read gemma4's pieces; runs of line breaks are whole tokens that no merge makes."""
    pieces = sentencepiece.Pieces(
        texts=source.texts,
        scores=[],
        kinds=source.kinds,
        unknown=source.id("unknown_token_id"),
        add_space_prefix=False,
        merges=_merges(source, set(source.texts)),
    )
    backend = sentencepiece.build(pieces, source.origin)
    breaks = [text for text in source.texts if len(text) > 1 and not text.strip("\n")]
    add_tokens(backend, special=source.special(), plain=breaks)
    return _vocabulary(source, backend, add_bos=True)


def _wordpiece(source: TokenizerMetadata) -> Vocabulary:
    names = {
        name: _first(source.id(f"{key}_token_id"), *source.ids_of(f"[{name}]"))
        for name, key in (("CLS", "cls"), ("SEP", "seperator"), ("UNK", "unknown"))
    }
    source.texts = wordpiece.add_prefixes(source.texts, source.kinds)
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


def _find_pre_tokenizer(source: TokenizerMetadata) -> Splitting:
    name = source.text("pre")
    if name in (None, "", "default"):
        name = BY_ARCHITECTURE.get(source.architecture or "", "gpt-2")
        if "<|begin_of_text|>" in source.texts and source.architecture == "llama":
            name = "llama-bpe"
        _log.warning("%s does not name its pre-tokenizer (%spre); using %r", source.origin, KEY, name)
    if name not in SPLITTINGS:
        raise InvalidModel(
            f"{source.origin}: {KEY}pre={name!r} is unknown (known: {', '.join(sorted(SPLITTINGS))}); "
            "use the model's safetensors folder with its tokenizer.json, or skip_tokenizer_init=True "
            "with token ids"
        )
    return SPLITTINGS[name]


READERS: dict[str, Callable[[TokenizerMetadata], Vocabulary]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _merged_pieces,
    "bert": _wordpiece,
    "t5": _unigram,
    "rwkv": _greedy,
}
