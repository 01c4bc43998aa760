"""Describe a folder's tokenizer by the keys of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel
from penstock.text.tokenizers import sentencepiece
from penstock.text.tokenizers.folder import read_vocabulary
from penstock.text.tokenizers.gguf import KEY, TEMPLATE_KEY
from penstock.text.tokenizers.gguf import read_vocabulary as read_metadata
from penstock.text.tokenizers.pre_tokenizers import SPLITTINGS
from penstock.text.tokenizers.vocabulary import Vocabulary

# the names that files usually carry come first among those that split alike
USUAL = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "deepseek-llm", "falcon", "dbrx", "stablelm2")
SAMPLE = "It's 12345 + 6,789!  naïve café\n\n\tdef f(x):\r\n  return x**2 # ok?? 東京 مرحبا Привет 😀 I'LL a.b_c  "


def describe_tokenizer(folder: Path, num_ids: int, architecture: str, sample: str) -> dict[str, Any]:
    """Return the keys; refuse a tokenizer that they would describe otherwise, by the tokens of a sample text."""
    vocabulary = read_vocabulary(folder)
    has_pieces = (folder / "tokenizer.model").is_file()
    model = json.loads(vocabulary.backend.to_str())
    is_byte_level = "ByteLevel" in json.dumps(model.get("pre_tokenizer"))
    if is_byte_level and model["model"]["type"] == "BPE":
        found = _byte_level(vocabulary, model["model"], num_ids)
    elif has_pieces:
        found = _sentencepiece(folder / "tokenizer.model", vocabulary, num_ids)
    else:
        raise InvalidModel(
            f"{folder}: GGUF files carry byte-level BPE and SentencePiece tokenizers; this tokenizer.json is neither, "
            "and there is no tokenizer.model: choose a scheme without gguf:"
        )
    found |= _ids(vocabulary)
    template = vocabulary.templates.get("default")
    if template is not None:
        found[TEMPLATE_KEY] = template
    again = read_metadata({"general.architecture": architecture, **found}, f"the GGUF file of {folder}")
    if encode(again, sample) != encode(vocabulary, sample):
        raise InvalidModel(
            f"{folder}: GGUF's keys would describe its tokenizer otherwise: choose a scheme without gguf:"
        )
    return found


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    ids: list[int] = vocabulary.backend.encode(text, add_special_tokens=False).ids
    return ids


def _byte_level(vocabulary: Vocabulary, model: dict[str, Any], num_ids: int) -> dict[str, Any]:
    backend = vocabulary.backend
    added = backend.get_added_tokens_decoder()
    texts, kinds = [], []
    for id in range(num_ids):
        text = backend.id_to_token(id)
        token = added.get(id)
        texts.append(f"[PAD{id}]" if text is None else text)
        kinds.append(
            sentencepiece.UNUSED
            if text is None
            else sentencepiece.NORMAL
            if token is None
            else sentencepiece.CONTROL
            if token.special
            else sentencepiece.USER_DEFINED
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": _find_splitting(vocabulary, bool(model.get("ignore_merges"))),
        f"{KEY}tokens": texts,
        f"{KEY}token_type": kinds,
        f"{KEY}merges": merges,
    }


def _find_splitting(vocabulary: Vocabulary, whole_words: bool) -> str:
    """Find the named pre-tokenizer that splits a sample as this one does."""
    backend = vocabulary.backend
    text = backend.normalizer.normalize_str(SAMPLE) if backend.normalizer else SAMPLE
    wanted = backend.pre_tokenizer.pre_tokenize_str(text)
    for name in (*USUAL, *SPLITTINGS):
        splitting = SPLITTINGS[name]
        is_like = splitting.whole_words == whole_words and splitting.compose == (backend.normalizer is not None)
        if is_like and splitting.build().pre_tokenize_str(text) == wanted:
            return name
    raise InvalidModel(
        f"{vocabulary.origin}: its pre-tokenizer is none that GGUF files have a name for: choose a scheme without gguf:"
    )


def _sentencepiece(path: Path, vocabulary: Vocabulary, num_ids: int) -> dict[str, Any]:
    pieces, _, _ = sentencepiece.read_model(path)
    texts, scores, kinds = list(pieces.texts), list(pieces.scores), list(pieces.kinds)
    added = vocabulary.backend.get_added_tokens_decoder()
    for id in range(len(texts), num_ids):
        token = added.get(id)
        texts.append(token.content if token else f"[PAD{id}]")
        scores.append(0.0)
        kinds.append(
            sentencepiece.UNUSED
            if token is None
            else sentencepiece.CONTROL
            if token.special
            else sentencepiece.USER_DEFINED
        )
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": texts[:num_ids],
        f"{KEY}scores": [float(score) for score in scores[:num_ids]],
        f"{KEY}token_type": kinds[:num_ids],
        f"{KEY}add_space_prefix": pieces.add_space_prefix,
    }


def _ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the tokens with a role, and those put before and after a prompt."""
    backend, found = vocabulary.backend, dict[str, Any]()
    spelled = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in spelled.items():
        id = backend.token_to_id(vocabulary.named.get(name, ""))
        if id is not None:
            found[f"{KEY}{key}_token_id"] = id
    if vocabulary.eos_token_ids:
        found[f"{KEY}eos_token_id"] = vocabulary.eos_token_ids[0]
        if len(vocabulary.eos_token_ids) > 1:
            found[f"{KEY}eot_token_id"] = vocabulary.eos_token_ids[1]
    if vocabulary.affixes is not None:
        before, after = vocabulary.affixes
    else:
        whole, inner = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
        before, after = tuple(whole[:at]), tuple(whole[at + len(inner) :])
    found[f"{KEY}add_bos_token"] = bool(before)
    found[f"{KEY}add_eos_token"] = bool(after)
    return found
