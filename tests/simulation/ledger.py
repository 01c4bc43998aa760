"""What was asked and what came back: every delta is compared with the answer computed apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types import Delta, Request
from tests.simulation.device import require
from tests.simulation.model import Answer, Model

FINISHED = ("stop", "length")


@dataclass
class Account:
    request: Request
    answers: dict[int, Answer] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # tokens so far, per sibling
    finished: dict[int, str] = field(default_factory=dict)  # why, per sibling
    beams: list[Delta] = field(default_factory=list)

    @property
    def over(self) -> bool:
        if self.request.beam:
            return bool(self.finished) and (len(self.finished) == self.expected_beams or self.broken_off)
        return len(self.finished) == self.request.num_siblings

    expected_beams: int = -1

    @property
    def broken_off(self) -> bool:
        return any(reason in ("abort", "error") for reason in self.finished.values())


class Ledger:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.open: dict[str, Account] = {}
        self.reasons: dict[str, int] = {}
        self.num_tokens = 0

    def enter(self, request: Request) -> None:
        self.open[request.id] = Account(request)

    def note(self, delta: Delta) -> None:
        account = self.open.get(delta.request_id)
        require(account is not None, "a delta of a request that is over", delta)
        assert account is not None
        require(delta.sibling not in account.finished, "a delta after the end", delta)
        if delta.finish_reason:
            account.finished[delta.sibling] = delta.finish_reason
            self.reasons[delta.finish_reason] = self.reasons.get(delta.finish_reason, 0) + 1
        if delta.finish_reason in ("abort", "error"):
            require(not delta.tokens, "tokens with an abort", delta)
            require((delta.error is not None) == (delta.finish_reason == "error"), "an error without words", delta)
        elif account.request.beam:
            self._note_beam(account, delta)
        elif account.request.pool:
            require(delta.embedding == self.model.pooled(account.request), "a wrong embedding", delta)
            require(delta.num_cached_tokens == 0, "a pooled prompt from the cache", delta)
        else:
            self._note_tokens(account, delta)
        if account.over:
            del self.open[delta.request_id]

    def _note_tokens(self, account: Account, delta: Delta) -> None:
        request, sibling = account.request, delta.sibling
        require(0 <= sibling < request.num_siblings and len(delta.tokens) > 0, "an empty or foreign delta", delta)
        if sibling not in account.answers:
            account.answers[sibling] = self.model.answer(request, sibling)
        answer, start = account.answers[sibling], account.taken.get(sibling, 0)
        end = start + len(delta.tokens)
        require(answer.tokens[start:end] == delta.tokens, "wrong tokens", delta, start, answer)
        over = end == len(answer.tokens)
        require(delta.finish_reason == (answer.finish_reason if over else None), "a wrong end", delta, answer)
        require(delta.stop_reason == (answer.stop_reason if over else None), "a wrong stop reason", delta, answer)
        logprobs = answer.logprobs[start:end] if request.sampling.logprobs is not None else ()
        require(delta.logprobs == logprobs, "wrong log probabilities", delta, logprobs)
        wanted = request.sampling.prompt_logprobs is not None and sibling == 0
        expected = self.model.prompt_logprobs(request) if wanted and start == 0 else None
        require(delta.prompt_logprobs == expected, "wrong prompt log probabilities", delta, expected)
        require(
            0 <= delta.num_cached_tokens < len(request.tokens) and not (wanted and delta.num_cached_tokens),
            "more is cached than can be",
            delta,
        )
        account.taken[sibling] = end
        self.num_tokens += len(delta.tokens)

    def _note_beam(self, account: Account, delta: Delta) -> None:
        """All beams come at the end, best first."""
        account.beams.append(delta)
        best = self.model.beams(account.request)
        account.expected_beams = len(best)
        require(delta.sibling < len(best), "a beam too many", delta)
        beam = best[delta.sibling]
        require((delta.tokens, delta.finish_reason) == (beam.tokens, beam.finish_reason), "a wrong beam", delta, beam)
        require(delta.cumulative_logprob == beam.score, "a wrong score", delta, beam)
        self.num_tokens += len(delta.tokens)
