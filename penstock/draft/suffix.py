"""Drafts from earlier answers to the same tenant: the tokens that followed the row's last ones there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.draft.drafter import Proposal, grade_match
from penstock.draft.text_index import END, MAX_MATCH, TextIndex
from penstock.sampling.row import RowState

MAX_TOKENS = 250_000  # of all earlier answers; about 150 bytes each
MAX_SCOPES = 256

Scope = tuple[str, ...]  # tenant, salt and adapters: answers are never drafts for another


class EarlierAnswers:
    """Finished answers by scope. The least recently used scope goes first, and the older half of one that fills
    half of the room."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_answers: int | None = None) -> None:
        self.max_tokens, self.max_answers = max_tokens, max_answers  # None: any number
        self._texts: OrderedDict[Scope, TextIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._texts.values()))

    def of(self, scope: Scope) -> TextIndex | None:
        found = self._texts.get(scope)
        if found is not None:
            self._texts.move_to_end(scope)
        return found

    def add(self, scope: Scope, tokens: Sequence[int]) -> None:
        if self.max_answers == 0:
            return
        tokens = [*tokens[-self.max_tokens // 2 :], END]
        index = self._texts.setdefault(scope, TextIndex())
        self._texts.move_to_end(scope)
        if len(index) + len(tokens) > self.max_tokens // 2:
            index = self._texts[scope] = TextIndex(index.tokens[len(index) // 2 :])
        index.extend(tokens)
        while len(self._texts) > MAX_SCOPES or len(self._texts) > 1 and self.num_tokens > self.max_tokens:
            self._texts.popitem(last=False)
        if self.max_answers is not None:
            self._forget_oldest(self.max_answers)

    def _forget_oldest(self, most: int) -> None:
        """Keep `most` answers, and of those over that the half of a scope that was used last."""
        counts = {scope: index.tokens.count(END) for scope, index in self._texts.items()}
        for scope in list(self._texts):
            over = sum(counts.values()) - most
            if over <= 0:
                return
            if over >= counts[scope] or counts[scope] == 1:
                del self._texts[scope], counts[scope]
                continue
            tokens = self._texts[scope].tokens
            for _ in range(max(over, counts[scope] // 2)):
                tokens = tokens[tokens.index(END) + 1 :]
            self._texts[scope], counts[scope] = TextIndex(tokens), tokens.count(END)


class AnswerFollower:
    """Looks the row's last tokens up in the scope's earlier answers."""

    def __init__(self, answers: EarlierAnswers, scope: Scope, tokens: Sequence[int]) -> None:
        self._answers, self._scope, self._tail = answers, scope, list(tokens[-MAX_MATCH:])

    def append(self, tokens: Sequence[int]) -> None:
        self._tail = [*self._tail, *tokens][-MAX_MATCH:]

    def propose(self, most: int) -> Proposal | None:
        index = self._answers.of(self._scope)
        match = index.find(self._tail) if index is not None else None
        if index is None or match is None:
            return None
        tokens = index.read(match.after, most)
        return grade_match(tokens, match.length) if tokens else None


class SuffixDrafter:
    name = "suffix"

    def __init__(self, max_tokens: int = MAX_TOKENS, max_answers: int | None = None) -> None:
        self.answers = EarlierAnswers(max_tokens, max_answers)

    def start(self, state: RowState) -> AnswerFollower:
        return AnswerFollower(self.answers, _scope(state), state.tokens)

    def finish(self, state: RowState) -> None:
        """Keep the answer, after the prompt's last tokens, so that its beginning is found too."""
        answer = state.tokens[state.num_prompt :]
        end = next((i for i, token in enumerate(answer) if token in state.stops), len(answer))
        if end:
            before = state.tokens[max(0, state.num_prompt - MAX_MATCH) : state.num_prompt]
            self.answers.add(_scope(state), [*before, *answer[:end]])


def _scope(state: RowState) -> Scope:
    return state.request.tenant, state.request.salt, state.request.lora_key
