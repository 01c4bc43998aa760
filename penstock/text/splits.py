"""How byte-level BPE vocabularies split text before merging, by the names GGUF files give them.

The patterns are part of each published tokenizer: with another one the same text gets other tokens than in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FOREIGN = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _words(digits: str) -> str:
    """Words with one leading mark, runs of punctuation, breaks; numbers by `digits`."""
    return rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"


def _cased_words(digits: str, ending: str) -> str:
    """As `_words`, but a capital after a small letter begins a new word."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (rf"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}")


def _marked_words() -> str:
    """As `_words`, but combining marks belong to words and symbols to punctuation."""
    return (r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BREAKS)


def _patterns(*patterns: str) -> PreTokenizer:
    return Sequence([*(Split(Regex(pattern), "isolated") for pattern in patterns),
                     ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    return Sequence([Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False),
                     Split(Regex("[0-9][0-9][0-9]"), "isolated")])


@dataclass(frozen=True)
class Splitting:
    build: Callable[[], PreTokenizer]
    compose: bool = False        # Unicode NFC first
    whole_words: bool = False    # a word that is a token is not merged anew
    add_bos: bool = False        # where the file does not say


def _named(splitting: Splitting, *names: str) -> dict[str, Splitting]:
    return {name: splitting for name in names}


_LLAMA3 = r"\p{N}{1,3}"
SPLITTINGS: dict[str, Splitting] = {
    **_named(Splitting(_gpt2), "gpt-2", "gpt2", "phi-2", "mpt", "jais", "trillion", "exaone4", "gigachat", "mellum",
             "a.x-4.0", "granite-docling"),
    **_named(Splitting(_gpt2, compose=True), "olmo"),
    **_named(Splitting(_single_digits), "starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"),
    **_named(Splitting(_single_digits, compose=True), "command-r"),
    **_named(Splitting(_falcon), "falcon"),
    **_named(Splitting(lambda: _patterns(_FOREIGN)), "bloom", "poro-chat", "gpt3-finnish"),
    **_named(Splitting(lambda: _patterns(_FOREIGN, r"\p{N}")), "viking"),
    **_named(Splitting(lambda: _patterns(_words(_LLAMA3)), whole_words=True, add_bos=True), "llama3", "llama-v3",
             "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2"),
    **_named(Splitting(lambda: _patterns(_words(_LLAMA3))), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    **_named(Splitting(lambda: _patterns(_words(r"\p{N}")), compose=True), "qwen2", "deepseek-r1-qwen", "megrez"),
    **_named(Splitting(lambda: _patterns(_words(r"\p{N}"))), "stablelm2", "hunyuan", "grok-2", "solar-open"),
    **_named(Splitting(lambda: _patterns(_cased_words(r"\p{N}", "")), whole_words=True, add_bos=True), "tekken"),
    **_named(Splitting(lambda: _patterns(_cased_words(_LLAMA3, _ENDING + "?"))), "gpt-4o", "llama4", "kanana2"),
    **_named(Splitting(lambda: _patterns(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
             "deepseek-coder"),
    **_named(Splitting(lambda: _patterns(_LLAMA3, "[一-龥぀-ゟ゠-ヿ]+", _marked_words())), "deepseek-v3",
             "hunyuan-dense"),
}

# Files from before the splitting was written down: what the architecture's published models use.
BY_ARCHITECTURE = {
    "falcon": "falcon", "bloom": "bloom", "starcoder": "starcoder", "starcoder2": "starcoder", "refact": "refact",
    "granite": "refact", "qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "olmo": "olmo", "gptneox": "olmo",
    "olmo2": "dbrx", "command-r": "command-r", "stablelm": "stablelm2",
}
