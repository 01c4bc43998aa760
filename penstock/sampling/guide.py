"""What one answer must match: its place in the grammar, and what its budget leaves for the end."""

from __future__ import annotations

from penstock.sampling.arrays import Array
from penstock.sampling.budget import Budget
from penstock.sampling.grammars import CompiledGrammar
from penstock.types import Request


class Guide:
    def __init__(self, compiled: CompiledGrammar, request: Request, max_tokens: int | None = None) -> None:
        """`max_tokens` are those left, where some stand before what must match."""
        self.grammar = compiled.begin(request)
        self.budget = Budget(compiled, self.grammar, request.max_tokens if max_tokens is None else max_tokens)
        self.forced: int | None = None  # no single token is ever forced; see ReasoningGuide

    @property
    def finished(self) -> bool:
        return self.grammar.complete or self.budget.remaining <= 0 and self.grammar.may_end

    @property
    def complete(self) -> bool:
        """True if nothing can follow, whatever the budget."""
        return self.grammar.complete

    def late_at(self, num_generated: int) -> bool:
        return True

    def accepts(self, token: int) -> bool:
        return self.grammar.accepts(token)

    @property
    def free(self) -> bool:
        """Whether the next token may be any that the grammar allows: the end is far, and there is one to come."""
        return not self.finished and self.budget.free

    def words(self, size: int) -> Array:
        return self.grammar.words(size)

    def mask(self, logits: Array) -> None:
        self.grammar.mask(logits)

    def instead_of(self, token: int) -> int | None:
        return self.budget.instead_of(token)

    def append(self, token: int) -> None:
        self.grammar.advance(token)
        self.budget.append(token)

    def truncate(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self.grammar.rollback(count)
        self.budget.truncate(count)
