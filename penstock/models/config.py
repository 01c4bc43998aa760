"""Strict reading of a checkpoint's config: every key is used, harmless, switched off, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.layer import LinearScaling, Llama3Scaling, LongScaling, Rope, Scaling, YarnScaling

T = TypeVar("T")

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_HIDDEN = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_SIZE = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 24

_REQUIRED: Any = object()

# Keys without effect on the forward pass: bookkeeping, training, special tokens, sampling defaults.
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


def _quote(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "a value nested too deep to show"
    return text if len(text) <= 80 else text[:77] + "..."


class Config:
    """Reads config keys and remembers which were read; `finish` refuses the rest.

    Methods take alternative names of one key: the first that is present and not null counts.
    """

    def __init__(self, values: Mapping[str, Any], max_model_len: int | None = None, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InvalidModel(f"config {path.rstrip('.') or 'file'} must be a JSON object, not {_quote(values)}")
        self.values = values
        self.max_model_len = max_model_len  # requested by the user
        self._path = path
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise InvalidModel(f"config key {self._path}{name}={_quote(self.values.get(name))} {reason}")

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
        """Return a finite number from `least` (or above `above`) to `most`."""
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
        """Return a list of `length` words out of `choices`; None if the key is absent."""
        found, value = self._find([name], None)
        if not found:
            return None
        if not isinstance(value, list) or len(value) != length or any(word not in choices for word in value):
            self.refuse(name, f"must be a list of {length} out of {', '.join(choices)}")
        return list(value)

    def switches(self, name: str, length: int) -> list[bool] | None:
        """Return a list of `length` zeros and ones; None if the key is absent or empty."""
        found, value = self._find([name], None)
        if not found or value == []:
            return None
        if not isinstance(value, list) or len(value) < length or any(one not in (0, 1) for one in value):
            self.refuse(name, f"must be a list of {length} zeros and ones")
        return [bool(one) for one in value[:length]]

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

    def places(self, name: str, length: int) -> set[int]:
        """Return a list of whole numbers below `length`, each once; none if the key is absent."""
        found, value = self._find([name], [])
        ok = isinstance(value, list) and all(type(one) is int and 0 <= one < length for one in value)
        if not ok or len(set(value)) != len(value):
            self.refuse(found, f"must be a list of different whole numbers from 0 to {length - 1}")
        return set(value)

    def only(self, name: str, *accepted: Any) -> None:
        """Require the key to be absent, null or one of `accepted`."""
        found, value = self._find([name], None)
        if found and not any(value == choice and type(value) is type(choice) for choice in accepted):
            self.refuse(name, f"is not supported: only {' or '.join(_quote(choice) for choice in accepted)} is")

    def ignore(self, *names: str) -> None:
        self._read.update(names)

    def section(self, name: str) -> Config | None:
        """Return a reader over an object within the config; None if it is absent or empty."""
        found, value = self._find([name], None)
        if not found or value == {}:
            return None
        if name not in self._sections:
            self._sections[name] = Config(value, self.max_model_len, f"{self._path}{name}.")
        return self._sections[name]

    def finish(self) -> None:
        """Refuse every unread key that is neither harmless nor switched off."""
        for name, value in self.values.items():
            if name not in self._read and name not in HARMLESS and not _is_off(value):
                self.refuse(name, "is unknown and may change the results, so the model is refused")
        for section in self._sections.values():
            section.finish()


KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")}
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_FACTOR = 1e6


def _parameters(c: Config, layer_type: str) -> Config | None:
    """Return the object that holds the RoPE parameters, wherever this config keeps it."""
    new, old = c.section("rope_parameters"), c.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        c.refuse("rope_scaling", "contradicts rope_parameters: keep one of them")
    if new is not None and any(key in LAYER_TYPES for key in new.values):
        for key in LAYER_TYPES:
            new.section(key)
        return new.section(layer_type)
    return (new or old) if layer_type == "full_attention" else None


def _kind(p: Config | None, aliases: Mapping[str, str]) -> str:
    return p.choice("rope_type", "type", choices={**KINDS, **aliases}, default="default") if p else "default"


def _factor(p: Config, default: float = _REQUIRED) -> float:
    return p.number("factor", default=default, above=0.0, most=MAX_FACTOR)


def _base_positions(c: Config) -> int:
    return c.count("max_position_embeddings", "n_positions", "seq_length", most=MAX_POSITIONS)


def _original(c: Config, p: Config) -> int:
    """Return the context length of pretraining: beside the RoPE parameters (Phi-3), among them, or the model's own."""
    inside = p.count("original_max_position_embeddings", default=_base_positions(c), least=2, most=MAX_POSITIONS)
    return c.count("original_max_position_embeddings", default=inside, least=2, most=MAX_POSITIONS)


def max_positions(c: Config, aliases: Mapping[str, str] | None = None) -> int:
    """Return the model's context length, scaling included."""
    positions = _base_positions(c)
    c.ignore("original_max_position_embeddings")
    p = _parameters(c, "full_attention")
    kind = _kind(p, aliases or {})
    if p is not None and kind == "dynamic":
        positions = int(positions * max(1.0, _factor(p)))
    if p is not None and kind == "yarn":
        original = _original(c, p)
        positions = max(positions, int(original * _factor(p, positions / original)))
    return min(positions, MAX_POSITIONS)


def max_model_len(c: Config, positions: int) -> int:
    """Return the requested context length, or the model's own."""
    if c.max_model_len is None:
        return positions
    if not 1 <= c.max_model_len <= positions:
        raise InvalidConfig(
            f"max_model_len={c.max_model_len} exceeds the model's context of {positions}: set 1 to {positions}"
        )
    return c.max_model_len


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(c: Config, p: Config) -> YarnScaling:
    original = _original(c, p)
    factor = _factor(p, _base_positions(c) / original)
    mscale, mscale_all = p.number("mscale", default=0.0), p.number("mscale_all_dim", default=0.0)
    usual = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor)
    p.ignore("finetuned")
    return YarnScaling(
        factor,
        original,
        p.number("attention_factor", default=usual, above=0.0),
        p.number("beta_fast", default=0.0) or 32.0,
        p.number("beta_slow", default=0.0) or 1.0,
        p.flag("truncate", True),
    )


def query_factor(c: Config) -> float:
    """Return what YaRN multiplies the scores of latent attention by: the square of mscale_all_dim's factor."""
    p = _parameters(c, "full_attention")
    if p is None or _kind(p, {}) != "yarn":
        return 1.0
    return _mscale(_factor(p), p.number("mscale_all_dim", default=0.0)) ** 2


def _long(c: Config, p: Config, size: int, length: int) -> LongScaling:
    original = _original(c, p)
    factor = _factor(p, _base_positions(c) / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {kind: p.number(f"{kind}_mscale", default=usual, above=0.0) for kind in ("short", "long")}  # PhiMoE
    short, long = p.numbers("short_factor", size // 2), p.numbers("long_factor", size // 2)
    chosen = "long" if length > original else "short"
    factor = p.number("attention_factor", default=factors[chosen], above=0.0)
    return LongScaling(long if chosen == "long" else short, factor)


def _llama3(c: Config, p: Config) -> Llama3Scaling:
    low = p.number("low_freq_factor", above=0.0)
    return Llama3Scaling(_factor(p), low, p.number("high_freq_factor", least=low), _original(c, p))


def _dynamic_theta(c: Config, p: Config, size: int, theta: float, length: int) -> float:
    """Compute the NTK-aware base for sequences of `length`."""
    if size < 4:
        p.refuse("rope_type", f"needs at least 4 rotated dimensions a head, not {size}")
    factor, positions = _factor(p), _base_positions(c)
    growth = factor * max(length, positions) / positions - (factor - 1)
    return float(theta * growth ** (size / (size - 2)))


def rope(
    c: Config,
    head_size: int,
    *,
    layer_type: str = "full_attention",
    theta: float = 10000.0,
    theta_keys: Sequence[str] = ("rope_theta",),
    fraction: float = 1.0,
    fraction_keys: Sequence[str] = ("partial_rotary_factor",),
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """Read the RoPE of one kind of layer. `theta` and `fraction` are the family's defaults under their old key
    names."""
    p = _parameters(c, layer_type)
    kind = _kind(p, aliases or {})
    theta = c.number(*theta_keys, default=theta, above=1.0, most=1e15)
    fraction = c.number(*fraction_keys, default=fraction, above=0.0, most=1.0)
    if p is not None:
        theta = p.number("rope_theta", default=theta, above=1.0, most=1e15)
        fraction = p.number("partial_rotary_factor", default=fraction, above=0.0, most=1.0)
    size = int(head_size * fraction)
    if size < 2 or size % 2:
        c.refuse(fraction_keys[0], f"rotates {size} of a head's {head_size} dimensions: they must be even in number")
    if p is None or kind == "default":
        return Rope(size, theta)
    length = max_model_len(c, max_positions(c, aliases))
    if kind == "dynamic":
        return Rope(size, _dynamic_theta(c, p, size, theta, length))
    scalings: dict[str, Callable[[], Scaling]] = {
        "linear": lambda: LinearScaling(_factor(p)),
        "llama3": lambda: _llama3(c, p),
        "yarn": lambda: _yarn(c, p),
        "factors": lambda: LongScaling(p.numbers("factors", size // 2), 1.0),  # of GGUF files: divisors of frequencies
        "longrope": lambda: _long(c, p, size, length),
    }
    return Rope(size, theta, scalings[kind]())
