"""A tokenizer as its files describe it: the backend and what stands around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidModel, PenstockError

TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<turn|>",
        "[EOT]",
        "<EOT>",
        "<end_of_utterance>",
    }
)
REMEDY = "download the model again, or pass skip_tokenizer_init=True and prompts as token ids"


@dataclass(frozen=True)
class Vocabulary:
    backend: Backend
    origin: str  # the file or folder, for messages
    num_ids: int | None = None  # ids run below this; None: as far as the backend's do
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, … as templates call them
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates; the main one is "default"
    affixes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # ids around a prompt; None: the backend's own
    aliases: Mapping[int, int] = field(default_factory=dict)  # id → another id of the same text
    infill: Mapping[str, int] = field(default_factory=dict)  # ids for filling in that a file names: pre, suf …

    def with_template(self, template: str) -> Vocabulary:
        """With this chat template alone; the ends of turns that it writes end answers too."""
        ends = [
            id
            for id, token in self.backend.get_added_tokens_decoder().items()
            if token.special and token.content in TURN_ENDS and token.content in template
        ]
        return replace(
            self, templates={"default": template}, eos_token_ids=tuple(dict.fromkeys([*self.eos_token_ids, *ends]))
        )


@contextmanager
def refusing(origin: str) -> Iterator[None]:
    """Whatever goes wrong within is the fault of the file. A panic of the library is no Exception, so all is caught."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidModel(f"{origin}: the tokenizer is damaged or of an unknown kind ({reason}); {REMEDY}") from error


def add_tokens(backend: Backend, special: list[str], plain: list[str], rstrip: frozenset[str] = frozenset()) -> None:
    """Make tokens the vocabulary already has match as they stand in raw text, before any splitting."""

    def token(text: str, is_special: bool) -> AddedToken:
        return AddedToken(text, special=is_special, normalized=False, rstrip=text in rstrip)

    backend.add_special_tokens([token(text, True) for text in special if text])
    backend.add_tokens([token(text, False) for text in plain if text])
