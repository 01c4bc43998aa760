"""The tools that an answer may call, and what they make of its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.chat_body import AllowedChoice, ChatBody, NamedChoice
from penstock.text.tools.grammar import call_grammar, is_strict, open_grammar
from penstock.types import StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Calling:
    """`tools` are those that may be called, in chat completions' form; the prompt may describe more."""

    tools: list[dict[str, Any]]
    parser: str
    is_forced: bool = False  # the answer is a call
    is_named: bool = False  # the client named the function
    is_narrowed: bool = False  # the prompt describes more tools
    is_parallel: bool = True

    @classmethod
    def of(cls, body: ChatBody, tools: list[dict[str, Any]], parser: str) -> Calling:
        choice, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
        if isinstance(choice, NamedChoice):
            named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            return cls(named, parser, is_forced=True, is_named=True, is_parallel=False)
        if isinstance(choice, AllowedChoice):
            names = choice.names
            allowed = [tool for tool in tools if tool["function"]["name"] in names]
            return cls(
                allowed,
                parser,
                choice.allowed_tools.mode == "required",
                is_narrowed=len(allowed) < len(tools),
                is_parallel=is_parallel,
            )
        return cls(tools, parser, choice == "required", is_parallel=is_parallel)

    def form(
        self, asked: StructuredOutputsParams | None, special: Mapping[str, int]
    ) -> tuple[StructuredOutputsParams | None, bool]:
        """The constraint on the whole answer, and whether it allows any text. `asked` is the constraint on its text.

        A forced call leaves no text to constrain. With a JSON schema the answer is JSON or tool calls; with a regex,
        choice or grammar there are no calls. Schemas of tools that are not strict may be relaxed."""
        strict = any(map(is_strict, self.tools))
        if self.is_forced:
            grammar = call_grammar(self.tools, self.parser, parallel=self.is_parallel, special=special)
            return StructuredOutputsParams(grammar=grammar, strict=strict), False
        if asked is not None:
            schema = ANY_OBJECT if asked.json_object else asked.json
            if schema is None:
                return asked, False
            grammar = open_grammar(self.tools, self.parser, self.is_parallel, special, answer=str(schema))
            return StructuredOutputsParams(grammar=grammar, strict=strict or asked.strict), False
        if not self.is_narrowed and not strict:
            return None, True
        grammar = open_grammar(self.tools, self.parser, self.is_parallel, special)
        return StructuredOutputsParams(grammar=grammar, strict=strict), True
