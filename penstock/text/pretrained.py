"""A model's tokenizer with the interface of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.errors import InvalidRequest
from penstock.text.chat.template import Message
from penstock.text.tokenizers.decoding import TokenNames
from penstock.text.tokenizers.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """Lists by name, also available as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _special_id(name: str) -> property:
    """Make a property for the id of a special token, as it is set now; None if there is none."""
    return property(lambda self: self._vocab.get(getattr(self, name)))


class PretrainedTokenizer:
    """Names and defaults are those of transformers. `eos_token`, `bos_token`, `unk_token` and `pad_token` may be
    set; nothing is ever padded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.origin
        self.chat_template = tokenizer.chat_template
        named = self._names.named
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
        spelt = {name: None if id is None else self._token(id) for name, id in ids.items()}
        self.bos_token: str | None = named.get("bos_token") or spelt["bos_token"]
        self.eos_token: str | None = named.get("eos_token") or spelt["eos_token"]
        self.unk_token: str | None = named.get("unk_token")
        self.pad_token: str | None = named.get("pad_token")

    @cached_property
    def _names(self) -> TokenNames:
        return self._tokenizer.program.describe()

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self._names.tokens) if token is not None}

    def _token(self, id: int) -> str | None:
        return self._names.tokens[id] if 0 <= id < len(self._names.tokens) else None

    bos_token_id, eos_token_id = _special_id("bos_token"), _special_id("eos_token")
    unk_token_id, pad_token_id = _special_id("unk_token"), _special_id("pad_token")

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones; `len` counts those too."""
        return self._names.num_base

    def __len__(self) -> int:
        return len(self._vocab)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [token for id in self.all_special_ids if (token := self._token(id)) is not None]

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self._token(ids) if isinstance(ids, int) else [self._token(int(id)) for id in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return ids; the unknown token's id, if any, for tokens not in the vocabulary."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens, self.unk_token_id)
        return [self._vocab.get(token, self.unk_token_id) for token in tokens]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str) -> list[str | None]:
        return [self._token(id) for id in self.encode(text, add_special_tokens=False)]

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        texts = [text] if isinstance(text, str) else list(text)
        ids = [self.encode(one, add_special_tokens=add_special_tokens) for one in texts]
        masks = [[1] * len(one) for one in ids]
        return (
            Encoding(input_ids=ids[0], attention_mask=masks[0])
            if isinstance(text, str)
            else Encoding(input_ids=ids, attention_mask=masks)
        )

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, *, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        if clean_up_tokenization_spaces:
            raise InvalidRequest("clean_up_tokenization_spaces=True is not supported: text is decoded exactly")
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **values: Any,
    ) -> Any:
        """Render one conversation or several, as ids or text. Control tokens spelled in messages are encoded as
        plain text."""
        if conversation and not isinstance(conversation[0], Mapping):
            return [
                self.apply_chat_template(
                    one,  # type: ignore[arg-type]
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=tokenize,
                    chat_template=chat_template,
                    **values,
                )
                for one in conversation
            ]
        given = {
            **values,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        ids, text = self._tokenizer.program.encode_chat(conversation, given, template=chat_template)  # type: ignore[arg-type]
        return ids if tokenize else text
