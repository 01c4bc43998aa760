"""Fill-in-the-middle: build a prompt from the text before and after a gap, with the model's FIM tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Encode = Callable[[str], list[int]]

MAX_TOKEN_CHARS = 32  # characters kept per token of a truncated half, at most
NO_INFILL = (
    "this model has no fill-in-the-middle tokens: leave the "
    "suffix out, or use a code model (Qwen-Coder, StarCoder, CodeLlama, DeepSeek-Coder, CodeGemma, Codestral)"
)
APART = "\u263a"  # merges with nothing that follows
REPOSITORY, FILE = "myproject\n", "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
# FIM tokens by vocabulary: Qwen and CodeGemma, StarCoder and Granite, SantaCoder,
# DeepSeek, CodeLlama, GLM, Falcon; suffix first: Seed-Coder, Codestral.
FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    (" <PRE>", " <SUF>", " <MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
    ("[PREFIX]", "[SUFFIX]", None),
)
SUFFIX_FIRST = frozenset({"<[fim-prefix]>", "[PREFIX]"})
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>")
FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", " <EOT>", "<EOT>")


@dataclass(frozen=True)
class InfillTokens:
    """The FIM token ids of a vocabulary. Any of `ends` ends the filled-in text."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()
    suffix_first: bool = False

    @property
    def ids(self) -> list[int]:
        named = (self.prefix, self.suffix, self.middle, self.repository, self.file, *self.ends)
        return list(dict.fromkeys(id for id in named if id is not None))


@dataclass(frozen=True)
class Gap:
    """A gap to fill: the text before and after it, and other files by name."""

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Room:
    """Token limits of a prompt; each half keeps the part next to the gap, the files keep their end."""

    num_tokens: int
    num_halves: int  # for both halves; three quarters go to the prefix


def find_infill_tokens(backend: Backend, named: Mapping[str, int]) -> InfillTokens | None:
    """Find FIM tokens by the ids a file names, else by the texts of added tokens; None if there are none."""
    added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    repository = named.get("rep", _first(added, REPOSITORIES))
    file = named.get("sep", _first(added, FILES))
    ends = [id for id in (repository, file, named.get("pad"), *(added.get(text) for text in ENDS)) if id is not None]
    if "pre" in named and "suf" in named and "mid" in named:
        return _make_tokens(named["pre"], named["suf"], named["mid"], repository, file, ends)
    for prefix, suffix, middle in FAMILIES:
        if prefix in added and suffix in added and (middle is None or middle in added):
            return _make_tokens(
                added[prefix],
                added[suffix],
                None if middle is None else added[middle],
                repository,
                file,
                ends,
                prefix in SUFFIX_FIRST,
            )
    return None


def _first(added: Mapping[str, int], texts: Sequence[str]) -> int | None:
    return next((added[text] for text in texts if text in added), None)


def _make_tokens(
    prefix: int,
    suffix: int,
    middle: int | None,
    repository: int | None,
    file: int | None,
    ends: list[int],
    suffix_first: bool = False,
) -> InfillTokens:
    given = [id for id in (prefix, suffix, middle) if id is not None]
    return InfillTokens(prefix, suffix, middle, repository, file, tuple(dict.fromkeys([*given, *ends])), suffix_first)


def trim(gap: Gap, room: Room) -> Gap:
    """Cut each text of the gap to what can fit in the prompt."""
    most, left = MAX_TOKEN_CHARS * room.num_halves, MAX_TOKEN_CHARS * room.num_tokens
    files: list[tuple[str, str]] = []
    for name, text in reversed(gap.files):
        if left > 0:
            files.append((name, text[-left:]))
            left -= len(text)
    return Gap(gap.prefix[-most:], gap.suffix[:most], tuple(reversed(files)))


def make_prompt(
    marks: InfillTokens, gap: Gap, encode: Encode, begin: Sequence[int], room: Room | None, is_spaced: bool = False
) -> list[int]:
    """Return the prompt's ids. `encode` adds a space before a text if `is_spaced`; `begin` comes first. Without
    `room` nothing is cut."""
    if room is not None:
        gap = trim(gap, room)
    prefix, suffix = encode(gap.prefix), _encode_on(gap.suffix, encode) if is_spaced else encode(gap.suffix)
    if room is not None:
        num_fixed = len(begin) + 3
        num_prefix = max(0, 3 * (room.num_halves // 4) - num_fixed)
        prefix, suffix = prefix[max(0, len(prefix) - num_prefix) :], suffix[: room.num_halves // 4]
    middle = [] if marks.middle is None else [marks.middle]
    first, second = [marks.prefix, *prefix], [marks.suffix, *suffix]
    halves = [*second, *first, *middle] if marks.suffix_first else [*first, *second, *middle]
    left = None if room is None else max(0, room.num_tokens - len(begin) - len(halves))
    return [*begin, *_files(marks, gap, encode, left), *halves]


def _encode_on(text: str, encode: Encode) -> list[int]:
    """Encode a text without the space that the tokenizer puts before every text."""
    head, ids = encode(APART), encode(APART + text)
    return ids[len(head) :] if ids[: len(head)] == head else encode(text)


def _files(marks: InfillTokens, gap: Gap, encode: Encode, left: int | None) -> list[int]:
    """Return the last `left` tokens of the repository's name and the other files, each after its name."""
    if not gap.files:
        return []
    ids: list[int] = [] if marks.file is None else _heading(marks, FILE, encode)
    for name, text in reversed(gap.files):
        if left is not None and len(ids) >= left:
            return ids[len(ids) - left :]
        kept = text if left is None else text[-MAX_TOKEN_CHARS * (left - len(ids)) :]
        ids = [*_heading(marks, name + "\n", encode), *encode(kept), *ids]
    if marks.repository is not None:
        ids = [marks.repository, *encode(REPOSITORY), *ids]
    return ids if left is None else ids[max(0, len(ids) - left) :]


def _heading(marks: InfillTokens, name: str, encode: Encode) -> list[int]:
    return encode(SNIPPET) if marks.file is None else [marks.file, *encode(name)]
