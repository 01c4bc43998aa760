"""Strict reading of a checkpoint's config: every key is understood, harmless, switched off, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from penstock.errors import InvalidModel

T = TypeVar("T")

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_HIDDEN = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_SIZE = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 24

_REQUIRED: Any = object()

# Keys that say nothing about the forward pass: bookkeeping, training, special tokens, sampling defaults.
HARMLESS = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version _name_or_path name_or_path auto_map _commit_hash
    use_cache cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset torchscript
    use_bfloat16 tf_legacy_loss gradient_checkpointing chunk_size_feed_forward is_decoder is_llama_config
    transformers.js_config unsloth_fixed unsloth_version tokenizer_class sentence_transformers
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    initializer_range init_std attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob
    resid_pdrop embd_pdrop attn_pdrop residual_dropout embedding_dropout classifier_dropout activation_dropout
    dropout layerdrop pretraining_tp
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate keys_to_ignore_at_inference
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty prefix max_sequence_length
""".split()
)


def _is_off(value: object) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Config:
    """A reader over the config's keys that remembers which were read; `finish` refuses the rest.

    Methods take alternative names for one key: the first that is present and not null counts.
    """

    def __init__(self, values: Mapping[str, Any], max_model_len: int | None = None, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InvalidModel(f"config {path or 'file'} must be a JSON object, not {_shown(values)}")
        self.values = values
        self.max_model_len = max_model_len  # what the user asked for
        self._path = path
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise InvalidModel(f"config key {self._path}{name}={_shown(self.values.get(name))} {reason}")

    def _find(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        self._read.update(names)
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is _REQUIRED:
            raise InvalidModel(f"config key {self._path}{names[0]} is missing: the model cannot be built without it")
        return "", default

    def count(self, *names: str, default: int = _REQUIRED, least: int = 1, most: int) -> int:
        name, value = self._find(names, default)
        if name and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            self.refuse(name, f"is out of range: it must be a whole number from {least} to {most}")
        return int(value)

    def number(
        self, *names: str, default: float = _REQUIRED, least: float = 0.0, most: float = 1e9, above: float | None = None
    ) -> float:
        """A finite number from `least` (or above `above`) to `most`."""
        name, value = self._find(names, default)
        if not name:
            return float(value)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300
        if not ok or not math.isfinite(value) or not least <= value <= most or (above is not None and value <= above):
            low = f"from {least}" if above is None else f"above {above} and"
            self.refuse(name, f"is out of range: it must be a number {low} to {most}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        found, value = self._find([name], default)
        if found and not isinstance(value, bool):
            self.refuse(found, "must be true or false")
        return bool(value)

    def choice(self, *names: str, choices: Mapping[str, T], default: str = _REQUIRED) -> T:
        name, value = self._find(names, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, f"is not supported: the known values are {', '.join(choices)}")
        return choices[value]

    def choices(self, name: str, choices: Sequence[str], length: int) -> list[str] | None:
        """A list of `length` words out of `choices`; None where the key is absent."""
        found, value = self._find([name], None)
        if not found:
            return None
        if not isinstance(value, list) or len(value) != length or any(word not in choices for word in value):
            self.refuse(name, f"must be a list of {length} out of {', '.join(choices)}")
        return list(value)

    def numbers(self, name: str, length: int, above: float = 0.0) -> tuple[float, ...]:
        found, value = self._find([name], _REQUIRED)
        ok = (
            isinstance(value, list)
            and len(value) == length
            and all(isinstance(x, (int, float)) and not isinstance(x, bool) and above < x <= 1e9 for x in value)
        )
        if not ok:
            self.refuse(found, f"must be a list of {length} numbers above {above}")
        return tuple(float(x) for x in value)

    def only(self, name: str, *accepted: Any) -> None:
        """The key may be absent, null or one of the accepted values."""
        found, value = self._find([name], None)
        if found and not any(value == choice and type(value) is type(choice) for choice in accepted):
            self.refuse(name, f"is not supported: only {' or '.join(_shown(choice) for choice in accepted)} is")

    def ignore(self, *names: str) -> None:
        self._read.update(names)

    def section(self, name: str) -> Config | None:
        """A reader over an object within the config; None where it is absent or empty."""
        found, value = self._find([name], None)
        if not found or value == {}:
            return None
        if name not in self._sections:
            self._sections[name] = Config(value, self.max_model_len, f"{self._path}{name}.")
        return self._sections[name]

    def finish(self) -> None:
        """Refuse every key that nobody read, that is not harmless and that is not switched off."""
        for name, value in self.values.items():
            if name not in self._read and name not in HARMLESS and not _is_off(value):
                self.refuse(name, "is not understood and may change the results: the model is refused")
        for section in self._sections.values():
            section.finish()
