"""Predicted outputs: the text that the client expects, followed as long as the answer agrees with it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draft.drafter import Proposal
from penstock.draft.text_index import MAX_MATCH, TextIndex
from penstock.sampling.row import RowState
from penstock.types.speculation import PREDICTION

PRIORS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95)  # by grade: after no token that agrees, 1, up to 3, 7, 15, more


class PredictedText:
    """A place in the prediction. After tokens that differ it is the one after the longest match of the answer's last
    tokens; without a match, each token is taken for another in the place of the predicted one."""

    def __init__(self, predicted: Sequence[int], answer: Sequence[int]) -> None:
        self._index = TextIndex(predicted)
        self._tail: list[int] = []
        self._at = self._num_agreed = 0
        self.append(answer)

    def append(self, tokens: Sequence[int]) -> None:
        predicted = self._index.tokens
        for token in tokens:
            self._tail = [*self._tail[1 - MAX_MATCH :], token]
            if self._at < len(predicted) and predicted[self._at] == token:
                self._at, self._num_agreed = self._at + 1, self._num_agreed + 1
                continue
            match = self._index.find(self._tail)
            self._at, self._num_agreed = (match.after, match.length) if match else (self._at + 1, 0)

    def propose(self, most: int) -> Proposal | None:
        tokens = self._index.read(self._at, most)
        grade = min(self._num_agreed.bit_length(), len(PRIORS) - 1)
        return Proposal(tokens, grade, PRIORS[grade]) if tokens else None


class PredictionDrafter:
    name = PREDICTION

    def start(self, state: RowState) -> PredictedText | None:
        predicted = state.request.prediction
        return PredictedText(predicted, state.tokens[state.num_prompt :]) if predicted else None

    def finish(self, state: RowState) -> None:
        pass
