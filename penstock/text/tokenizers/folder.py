"""Read the tokenizer in a model's folder.

`tokenizer.json` alone suffices; otherwise `vocab.json` with `merges.txt` (byte-level BPE) or SentencePiece's
`tokenizer.model`. Smaller files add the tokens that begin and end a text, the chat template and the end ids. The
affixes of `tokenizer.json` win over `add_bos_token`; for the other two kinds `add_bos_token` and `add_eos_token`
decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from penstock.errors import InvalidModel
from penstock.host.files import read_regular
from penstock.text.tokenizers import sentencepiece
from penstock.text.tokenizers.pre_tokenizers import SPLITTINGS
from penstock.text.tokenizers.vocabulary import REMEDY, Vocabulary, add_tokens, refuse_damage

MAX_FILE_BYTES = 1 << 30
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_vocabulary(folder: Path) -> Vocabulary:
    if not folder.is_dir():
        raise InvalidModel(f"{folder} is not a folder; a tokenizer is read from a model's folder or a GGUF file")
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    with refuse_damage(str(folder)):
        backend, defaults = _backend(folder, settings)
        backend.no_truncation()
        backend.no_padding()
        settings = {**defaults, **{key: value for key, value in settings.items() if value is not None}}
        _add_tokens(backend, settings, _json(folder / "added_tokens.json"))
        named = _name_tokens(backend, settings, config)
        end = backend.token_to_id(_content(settings.get("eos_token")) or "")
        eos = [*_ids(generation, config, "eos_token_id"), end]
        return Vocabulary(
            backend=backend,
            origin=str(folder),
            eos_token_ids=tuple(dict.fromkeys(id for id in eos if id is not None)),
            bos_token_id=backend.token_to_id(named.get("bos_token", "")),
            named=named,
            templates=_templates(folder, settings),
            affixes=None if (folder / "tokenizer.json").exists() else _affixes(backend, settings, named),
        )


def _backend(folder: Path, settings: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Return the backend, and the settings implied if the smaller files are silent."""
    if (folder / "tokenizer.json").exists():
        with refuse_damage(str(folder / "tokenizer.json")):
            return Backend.from_str(_text(folder / "tokenizer.json")), {}
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _byte_level(folder, settings)
    if (folder / "tokenizer.model").exists():
        with refuse_damage(str(folder / "tokenizer.model")):
            return _sentencepiece(folder / "tokenizer.model")
    raise InvalidModel(
        f"{folder} has no tokenizer (no tokenizer.json, no vocab.json with merges.txt, no tokenizer.model); copy the "
        "model's tokenizer.json there, or pass skip_tokenizer_init=True and prompts as token ids"
    )


def _byte_level(folder: Path, settings: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    vocab = _json(folder / "vocab.json")
    merges = []
    for number, line in enumerate(_text(folder / "merges.txt").split("\n"), 1):
        if not line or line.startswith("#version"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise InvalidModel(f"{folder / 'merges.txt'} line {number} is not a pair of tokens; {REMEDY}")
        merges.append((pair[0], pair[1]))
    splitting = SPLITTINGS["qwen2" if settings.get("tokenizer_class") == "Qwen2Tokenizer" else "gpt-2"]
    with refuse_damage(str(folder / "vocab.json")):
        backend = Backend(BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC() if splitting.compose else None
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return backend, {"bos_token": end, "eos_token": end} if end in vocab else {}


def _sentencepiece(path: Path) -> tuple[Backend, dict[str, Any]]:
    pieces, bos, eos = sentencepiece.read_model(path)
    backend = sentencepiece.build(pieces, str(path))
    named = {
        name: pieces.texts[id] for name, id in (("bos_token", bos), ("eos_token", eos)) if 0 <= id < len(pieces.texts)
    }
    return backend, {**named, "add_bos_token": True}


def _add_tokens(backend: Backend, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Add tokens named outside the tokenizer's own file; new ones follow its last id."""
    entries = {int(id): entry for id, entry in (settings.get("added_tokens_decoder") or {}).items()}
    for text, id in extra.items():
        entries.setdefault(int(id), {"content": text, "special": False, "normalized": False})
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for id, entry in sorted(entries.items()):
        known = backend.token_to_id(entry["content"])
        if known == id or known is None and id == backend.get_vocab_size():
            backend.add_tokens([AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})])
    special = [_content(settings.get(name)) for name in NAMES]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(name) or []
        special += [_content(token) for token in (listed.values() if isinstance(listed, dict) else listed)]
    add_tokens(backend, special=[text for text in special if text and backend.token_to_id(text) is not None], plain=[])


def _content(token: Any) -> str | None:
    """Return the text of a token, given as text or as a table with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _name_tokens(backend: Backend, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: text for name in NAMES if (text := _content(settings.get(name)))}
    for name in ("bos_token", "eos_token", "pad_token"):
        for id in _ids(config, {}, name + "_id")[:1]:
            text = backend.id_to_token(id)
            if text is not None:
                named.setdefault(name, text)
    return named


def _ids(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> list[int]:
    """Return an id or a list of ids from the first of two files that has `key`."""
    value = first.get(key) if first.get(key) is not None else second.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool):
            raise InvalidModel(f"{key}={value!r} in the model's configuration must be a token id or a list of them")
    return [id for id in ids if 0 <= id < 2**32]


def _affixes(
    backend: Backend, settings: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def ids(name: str) -> tuple[int, ...]:
        id = backend.token_to_id(named.get(name, ""))
        return (id,) if settings.get(f"add_{name}") is True and id is not None else ()

    return ids("bos_token"), ids("eos_token")


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates, newest location first: a .jinja file, a JSON file, the tokenizer's settings."""
    written = settings.get("chat_template")
    if isinstance(written, list):
        written = {entry.get("name"): entry.get("template") for entry in written if isinstance(entry, dict)}
    templates = written if isinstance(written, dict) else {"default": written}
    templates = {
        **templates,
        "default": _json(folder / "chat_template.json").get("chat_template") or templates.get("default"),
    }
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _text(folder / "chat_template.jinja")
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}


def _text(path: Path) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(f"{path} cannot be read ({error}); {REMEDY}") from error


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        table = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(table, dict):
        raise InvalidModel(f"{path} must hold a JSON object, not {type(table).__name__}; download the model again")
    return table
