"""Pre-tokenizers of byte-level BPE vocabularies, by their names in GGUF files.

Each pattern belongs to a published tokenizer: another one would give other tokens than in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_FOREIGN = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits in threes, counted from the end
_RIGHT_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|\n+"
# Cased letters, as deepseek-llm lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_EASTERN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"


def _words(digits: str, breaks: str = _BREAKS) -> str:
    """Return a pattern for words with one leading mark, runs of punctuation and breaks; numbers by `digits`."""
    return rf"{_ENDING}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{breaks}"


def _cased_words(digits: str, ending: str, more: str = "", tail: str = r"[\r\n/]*") -> str:
    """Like `_words`, but a capital after a small letter begins a new word. `more` narrows letters."""
    upper, lower = (f"[{letters}{more}]" for letters in (_UPPER, _LOWER))
    return (
        rf"{_LEAD}{upper}*{lower}+{ending}|{_LEAD}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{tail}|{_BREAKS}"
    )


def _marked_words() -> str:
    """Like `_words`, but combining marks belong to words and symbols to punctuation."""
    return r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BREAKS


def _patterns(*patterns: str) -> PreTokenizer:
    return Sequence(
        [
            *(Split(Regex(pattern), "isolated") for pattern in patterns),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    return Sequence(
        [
            Punctuation("contiguous"),
            _gpt2(),
            Digits(individual_digits=False),
            Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


def _chameleon() -> PreTokenizer:
    words = [r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"]
    return Sequence(
        [
            *(Split(Regex(word), "isolated") for word in words),
            Digits(individual_digits=True),
            Punctuation("isolated"),
            _gpt2(),
        ]
    )


@dataclass(frozen=True)
class Splitting:
    """A pre-tokenizer and the settings that come with it."""

    build: Callable[[], PreTokenizer]
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # do not merge a word that is a token
    add_bos: bool = False  # if the file does not say


def _by_name(splitting: Splitting, *names: str) -> dict[str, Splitting]:
    return {name: splitting for name in names}


_LLAMA3 = r"\p{N}{1,3}"
_ENDS = _ENDING + "?"
_KIMI_WORDS = r"\p{Han}+|" + _cased_words(_LLAMA3, _ENDS, r"&&[^\p{Han}]", r"[\r\n]*")
_RUNS = ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
_SPACES = r"\s*[\r\n]+|" + "|".join(rf"\s{{{count}}}(?!\S)" for count in _RUNS) + r"|\s"
_JOINED_WORDS = (
    rf"{_ENDING}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_ACCENTED_WORDS = rf"{_ENDING}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_LING_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_SEED_WORDS = rf"{_ENDING}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_BREAKS}"

SPLITTINGS: dict[str, Splitting] = {
    **_by_name(
        Splitting(_gpt2),
        "gpt-2",
        "gpt2",
        "phi-2",
        "mpt",
        "jais",
        "trillion",
        "exaone4",
        "gigachat",
        "mellum",
        "a.x-4.0",
        "granite-docling",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v1-en",
        "jina-v2-code",
        "roberta-bpe",
        "modern-bert",
    ),
    **_by_name(Splitting(_gpt2, compose=True), "olmo"),
    **_by_name(
        Splitting(_single_digits), "starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"
    ),
    **_by_name(Splitting(_single_digits, compose=True), "command-r"),
    **_by_name(Splitting(_falcon), "falcon"),
    **_by_name(Splitting(_chameleon, add_bos=True), "chameleon"),
    **_by_name(Splitting(lambda: _patterns(_FOREIGN)), "bloom", "poro-chat", "gpt3-finnish"),
    **_by_name(Splitting(lambda: _patterns(_FOREIGN, r"\p{N}")), "viking"),
    **_by_name(
        Splitting(lambda: _patterns(_words(_LLAMA3)), whole_words=True, add_bos=True),
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "midm-2.0",
        "lfm2",
        "pixtral",
        "jina-v5-nano",
    ),
    **_by_name(Splitting(lambda: _patterns(_LLAMA3, _words(r"\p{N}+")), whole_words=True), "minicpm5"),
    **_by_name(Splitting(lambda: _patterns(_words(_LLAMA3))), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    **_by_name(Splitting(lambda: _patterns(_words(_LLAMA3, _SPACES))), "jais-2"),
    **_by_name(
        Splitting(lambda: _patterns(_words(r"\p{N}")), compose=True), "qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"
    ),
    **_by_name(Splitting(lambda: _patterns(_words(r"\p{N}"))), "stablelm2", "hunyuan", "grok-2", "solar-open", "kormo"),
    **_by_name(Splitting(lambda: _patterns(_LINES, _words(r"\p{N}"))), "laguna"),
    **_by_name(Splitting(lambda: _patterns(_ACCENTED_WORDS), compose=True), "qwen35"),
    **_by_name(Splitting(lambda: _patterns(_LING_WORDS)), "bailingmoe", "bailingmoe2", "llada-moe"),
    **_by_name(Splitting(lambda: _patterns(_SEED_WORDS)), "seed-coder"),
    **_by_name(Splitting(lambda: _patterns(_JOINED_WORDS)), "exaone-moe"),
    **_by_name(Splitting(lambda: _patterns(r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    **_by_name(Splitting(lambda: _patterns(_cased_words(r"\p{N}", "")), whole_words=True, add_bos=True), "tekken"),
    **_by_name(
        Splitting(lambda: _patterns(_cased_words(_LLAMA3, _ENDS))),
        "gpt-4o",
        "llama4",
        "kanana2",
        "talkie",
        "minimax-m2",
    ),
    **_by_name(Splitting(lambda: _patterns(_cased_words(_LLAMA3, _ENDS)), whole_words=True), "granite-embed-multi-97m"),
    **_by_name(
        Splitting(lambda: _patterns(_THREES, _cased_words(_LLAMA3, _ENDS)), compose=True), "tiny_aya", "cohere2moe"
    ),
    **_by_name(Splitting(lambda: _patterns(_EASTERN, _cased_words(r"\p{N}", _ENDS)), whole_words=True), "youtu"),
    **_by_name(Splitting(lambda: _patterns(_KIMI_WORDS)), "kimi-k2"),
    **_by_name(
        Splitting(
            lambda: _patterns(
                r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+"
            )
        ),
        "deepseek-llm",
    ),
    **_by_name(Splitting(lambda: _patterns(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")), "deepseek-coder"),
    **_by_name(
        Splitting(lambda: _patterns(_LLAMA3, "[一-龥぀-ゟ゠-ヿ]+", _marked_words())),
        "deepseek-v3",
        "hunyuan-dense",
        "joyai-llm",
    ),
    **_by_name(Splitting(lambda: _patterns(_RIGHT_THREES, _ASIAN, _marked_words())), "afmoe"),
}

# Files without `pre`: that of the architecture's published models.
BY_ARCHITECTURE = {
    "falcon": "falcon",
    "bloom": "bloom",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
    "refact": "refact",
    "granite": "refact",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "olmo": "olmo",
    "gptneox": "olmo",
    "olmo2": "dbrx",
    "command-r": "command-r",
    "stablelm": "stablelm2",
}
