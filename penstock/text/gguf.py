"""The tokenizer that a GGUF file carries in its metadata.

Kinds: `gpt2` (byte-level BPE, split as `tokenizer.ggml.pre` names) and `llama` (SentencePiece BPE). An unknown split is
refused: with a near one the model would read other tokens than it was trained on. Files from before splits were named
(no `pre`, or `default`) get the one their architecture's published models use, else GPT-2's.

What ends an answer: the ids the file names as end of sequence, of turn and of message, and any control token that is
a known end of turn (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>` …) and is written by the file's own chat template.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from penstock.errors import InvalidModel
from penstock.text import spm
from penstock.text.splits import BY_ARCHITECTURE, SPLITTINGS, Splitting
from penstock.text.vocabulary import REMEDY, Vocabulary, add_tokens, refusing

KEY = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
TURN_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|endoftext|>",
    "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<turn|>", "[EOT]", "<EOT>", "<end_of_utterance>",
})
_log = logging.getLogger(__name__)


def read_vocabulary(metadata: Mapping[str, Any], origin: str = "GGUF file") -> Vocabulary:
    source = _Metadata(metadata, origin)
    kind = source.text("model")
    if kind is None:
        raise InvalidModel(f"{origin} carries no tokenizer (no {KEY}model); use a file that has one, or pass "
                           "skip_tokenizer_init=True and prompts as token ids")
    if kind not in ("gpt2", "llama"):
        raise InvalidModel(f"{origin}: {KEY}model={kind!r} is not supported (known: gpt2, llama); use the model's "
                           "safetensors folder with its tokenizer.json, or skip_tokenizer_init=True with token ids")
    with refusing(origin):
        return _byte_level(source) if kind == "gpt2" else _sentencepiece(source)


class _Metadata:
    """The tokenizer's keys, each checked for its type before use."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin
        self.texts = self.array("tokens", str)
        if not self.texts:
            raise InvalidModel(f"{origin}: {KEY}tokens is missing or empty; {REMEDY}")
        self.kinds = self.array("token_type", int, len(self.texts)) or [spm.NORMAL] * len(self.texts)
        for id in self.of_kind(spm.UNUSED):       # rows without a token that only make the embedding rounder
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
        """A token's id; one outside the vocabulary counts as not given."""
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

    def special(self) -> list[str]:
        """Control tokens, and what the file names as beginning and end whatever their kind."""
        named = [self.id(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
        ids = self.of_kind(spm.UNKNOWN, spm.CONTROL) + [id for id in named if id is not None]
        return [self.texts[id] for id in dict.fromkeys(ids)]

    @property
    def architecture(self) -> str | None:
        return cast("str | None", self._value("general.architecture", str, "a string"))

    def templates(self) -> dict[str, str]:
        found = {}
        for key in self.values:
            if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + "."):
                found[key[len(TEMPLATE_KEY) + 1:] or "default"] = self._value(key, str, "a string")
        return found


def _vocabulary(source: _Metadata, backend: Backend, add_bos: bool, bos: int | None, eos: int | None) -> Vocabulary:
    templates = source.templates()
    bos, eos = _first(source.id("bos_token_id"), bos), _first(source.id("eos_token_id"), eos)
    ids = {"bos_token": bos, "eos_token": eos, "unk_token": source.id("unknown_token_id"),
           "pad_token": source.id("padding_token_id")}
    prefix = (bos,) if bos is not None and source.flag("add_bos_token", add_bos) else ()
    suffix = (eos,) if eos is not None and source.flag("add_eos_token", False) else ()
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
        aliases={id: last[text] for id, text in enumerate(source.texts) if last[text] != id and text},
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _turn_ends(source: _Metadata, templates: Mapping[str, str]) -> list[int]:
    return [id for id in source.of_kind(spm.CONTROL)
            if source.texts[id] in TURN_ENDS and any(source.texts[id] in text for text in templates.values())]


def _sentencepiece(source: _Metadata) -> Vocabulary:
    num = len(source.texts)
    scores: Sequence[float] = source.array("scores", float, num) or range(0, -num, -1)
    if not all(map(math.isfinite, scores)):
        raise InvalidModel(f"{source.origin}: {KEY}scores must be finite numbers; {REMEDY}")
    rstrip: frozenset[str] = frozenset()
    if source.architecture == "phi3":        # its tokenizer swallows the line break after a role
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
    bos, eos = (id if id in source.of_kind(spm.CONTROL) else None for id in (1, 2))    # SentencePiece's own places
    return _vocabulary(source, backend, add_bos=True, bos=bos, eos=eos)


def _byte_level(source: _Metadata) -> Vocabulary:
    splitting = _splitting(source)
    ids = {text: id for id, text in enumerate(source.texts) if text}
    merges = []
    for merge in source.array("merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1:]
        if cut < 0 or not right:
            raise InvalidModel(f"{source.origin}: {KEY}merges has {merge[:40]!r}, which is not a pair; {REMEDY}")
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    backend = Backend(BPE(vocab=ids, merges=merges, ignore_merges=splitting.whole_words))
    backend.normalizer = normalizers.NFC() if splitting.compose else None
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, special=source.special(),
               plain=[source.texts[id] for id in source.of_kind(spm.USER_DEFINED)])
    return _vocabulary(source, backend, add_bos=splitting.add_bos, bos=None, eos=None)


def _splitting(source: _Metadata) -> Splitting:
    name = source.text("pre")
    if name in (None, "", "default"):
        name = BY_ARCHITECTURE.get(source.architecture or "", "gpt-2")
        if "<|begin_of_text|>" in source.texts and source.architecture == "llama":
            name = "llama-bpe"
        _log.warning("%s does not say how its tokenizer splits text (%spre); taking %r", source.origin, KEY, name)
    if name not in SPLITTINGS:
        raise InvalidModel(f"{source.origin}: {KEY}pre={name!r} is unknown (known: {', '.join(sorted(SPLITTINGS))}); "
                           "use the model's safetensors folder with its tokenizer.json, or skip_tokenizer_init=True "
                           "with token ids")
    return SPLITTINGS[name]
