"""Write a vocabulary as the tokenizer files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import processors

from penstock.errors import InvalidModel
from penstock.text.tokenizers.vocabulary import Vocabulary

ENDLESS = int(1e30)  # transformers' "no limit"


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, and the chat template where there is one."""
    backend = vocabulary.backend
    if vocabulary.matcher is not None:
        raise InvalidModel(
            f"{vocabulary.origin}: tokenizer.json cannot hold an RWKV tokenizer: choose a scheme with gguf:"
        )
    if vocabulary.affixes is not None:
        before, after = ([(backend.id_to_token(id), id) for id in ids] for ids in vocabulary.affixes)
        if before or after:
            single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
            pair = [*single, *(f"{text}:1" for text, _ in before), "$B:1", *(f"{text}:1" for text, _ in after)]
            backend.post_processor = processors.TemplateProcessing(
                single=single, pair=pair, special_tokens=list(dict.fromkeys([*before, *after]))
            )
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": ENDLESS}
    settings |= vocabulary.named
    template = vocabulary.templates.get("default")
    if template is not None:
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
