"""Sampling state of one row: its parameters, its tokens and who samples it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from penstock.errors import InvalidRequest
from penstock.ops.sampling.row_params import MAX_BIASED, MAX_COUNTED, MAX_LOGPROBS, NEUTRAL
from penstock.sampling.grammar.answer_guide import AnswerGuide
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.matcher import GrammarFailed
from penstock.sampling.grammar.reasoning_guide import ReasoningGuide
from penstock.sampling.logits import Array
from penstock.sampling.masks import MAX_VOCAB, NEVER, Masks
from penstock.sampling.penalties import Penalties
from penstock.sampling.processors import apply_processors
from penstock.sampling.rare.stateful import StatefulSamplers, pack_extras
from penstock.types import Request

MAX_PENALTY = 1e38  # that float32 holds


class Chooser(IntEnum):
    """Who samples a row, and with how much. A step takes the kernels of its largest device row."""

    ARGMAX = 0  # greedy and nothing else
    DEVICE = 1  # a temperature alone
    DEVICE_FILTERED = 2  # filters, penalties, biases, masks or log probabilities
    DEVICE_EXTRAS = 3  # DRY, XTC, mirostat and the like too
    HOST = 4


def find_chooser(row: RowState) -> Chooser:
    """Who samples a row, by its parameters."""
    request, sampling, samplers = row.request, row.request.sampling, row.samplers
    is_host_only = request.beam is not None or bool(row.processors) or bool(sampling.logprob_token_ids)
    has_temperature_only = (
        not is_host_only
        and row.num_logprobs is None
        and not row.masks.is_ever_active
        and not row.has_penalties
        and sampling.structured_outputs is None
        and request.reasoning is None
        and samplers.dry is None
    )
    if has_temperature_only and (sampling.greedy or not row.has_filters):
        return Chooser.ARGMAX if sampling.greedy else Chooser.DEVICE
    if (
        is_host_only
        or not sampling.greedy
        and sampling.typical_p < 1
        or (row.num_logprobs or 0) > MAX_LOGPROBS
        or len(row.masks.bias[0]) > MAX_BIASED
        or row.has_penalties
        and (row.penalties.window or 0) > MAX_COUNTED // 2
    ):
        return Chooser.HOST
    is_reshaped = samplers.mu is not None or sampling.top_n_sigma > 0 or sampling.has_xtc or sampling.dynatemp_range > 0
    if samplers.dry is not None or row.has_penalty_window or is_reshaped and not sampling.greedy:
        return Chooser.DEVICE_EXTRAS
    return Chooser.DEVICE_FILTERED


class RowState:
    """Made at admission and extended by every token that is kept."""

    def __init__(
        self,
        request: Request,
        sibling: int,
        tokens: Sequence[int],
        num_prompt: int,
        grammars: GrammarCompiler | None = None,
        mu: float | None = None,
    ) -> None:
        """`mu` is mirostat's after `tokens`, if some of them were generated."""
        self.request, self.sibling, self.num_prompt = request, sibling, num_prompt
        self.tokens = list(tokens)
        self.stops = frozenset(request.stop_token_ids)
        self.masks = Masks(request)
        self.processors = request.sampling.logits_processors or ()
        self.penalties = Penalties(request.sampling, self.tokens, num_prompt)
        self.has_penalties = self.penalties.active
        self.samplers = StatefulSamplers(request, self.tokens, mu)
        self.failure: str | None = None  # why no more tokens can be chosen
        self.guide = self._make_guide(grammars)
        sampling = request.sampling
        self.has_filters = (
            sampling.top_k > 0
            or sampling.min_p > 0
            or sampling.top_p < 1
            or sampling.typical_p < 1
            or sampling.top_n_sigma > 0
            or sampling.has_xtc
            or sampling.dynatemp_range > 0
            or bool(sampling.mirostat)
        )
        self.has_mask = self.masks.forbids or self.guide is not None
        self.chooser = find_chooser(self)
        # The device samples every token, and the host keeps nothing but the tokens.
        self.is_steady = self.chooser <= Chooser.DEVICE or (
            self.chooser is Chooser.DEVICE_FILTERED
            and self.guide is None
            and self.failure is None
            and not self.has_mask
        )

    def _make_guide(self, grammars: GrammarCompiler | None) -> AnswerGuide | ReasoningGuide | None:
        """Make the guide of a reasoning block or a grammar and give it the tokens generated so far."""
        asked, block = self.request.sampling.structured_outputs, self.request.reasoning
        if asked is None and block is None or self.request.beam is not None:
            return None
        try:
            if grammars is None:
                raise InvalidRequest(
                    "structured_outputs and thinking_token_budget need a tokenizer: do not set skip_tokenizer_init"
                )
            guide: AnswerGuide | ReasoningGuide
            if block is not None:
                guide = ReasoningGuide(self.request, block, grammars)
            else:
                assert asked is not None
                guide = AnswerGuide(grammars.compile(asked), self.request)
            for token in self.tokens[self.num_prompt :]:
                guide.append(token)
            return guide
        except (InvalidRequest, GrammarFailed) as error:
            self.failure = str(error)
            return None

    @property
    def can_verify_on_device(self) -> bool:
        """True if the device samples each token of a draft as it would alone: no penalty counts the ones before it."""
        return self.is_steady and not self.has_penalties

    @property
    def next_chooser(self) -> Chooser:
        """Who samples the next token: the host while a grammar is near its end or has failed."""
        return self.chooser if self.failure is None and (self.guide is None or self.guide.free) else Chooser.HOST

    @property
    def has_device_params(self) -> bool:
        """True if a device samples this row with more than a temperature."""
        return self.chooser in (Chooser.DEVICE_FILTERED, Chooser.DEVICE_EXTRAS)

    @property
    def has_penalty_window(self) -> bool:
        """True if penalties count only some of the last tokens."""
        return self.has_penalties and self.penalties.window is not None

    def extras(self) -> list[float]:
        """The columns of `ops.sampling.extras`."""
        window = self.penalties.window or 0 if self.has_penalty_window else 0
        return pack_extras(self.request.sampling, self.samplers.mu, window, self.num_prompt)

    def is_mask_late(self, num_generated: int) -> bool:
        """True if the mask after `num_generated` tokens depends on all of them."""
        return self.masks.depends_on_last or self.guide is not None and self.guide.late_at(num_generated)

    def stage(self, num_generated: int) -> int:
        """Number the bitmasks: equal stages have equal ones; -1 for one that depends on the tokens."""
        return -1 if self.is_mask_late(num_generated) else self.masks.stage(num_generated)

    def words(self, num_generated: int, size: int) -> Array:
        """The bitmask of tokens that may come next; raises GrammarFailed."""
        if self.guide is not None and self.guide.forced is not None:
            return self.guide.bitmask(size)
        words = self.masks.bitmask(self.tokens, self.num_prompt, num_generated, size)
        return words if self.guide is None else words & self.guide.bitmask(size)

    def row_params(self) -> list[float]:
        """The columns of `ops.sampling.row_params`: neutral unless the device samples the row; no filters if greedy."""
        if not self.has_device_params:
            return list(NEUTRAL)
        sampling = self.request.sampling
        filters = (
            [0.0, 1.0, 0.0]
            if sampling.greedy or self.samplers.mu is not None
            else [float(min(max(0, sampling.top_k), MAX_VOCAB)), float(sampling.top_p), float(sampling.min_p)]
        )
        asked = 0.0 if self.num_logprobs is None else self.num_logprobs + 1.0
        strengths = (min(strength, MAX_PENALTY) for strength in self.penalties.strengths)
        return [*filters, *strengths, float(len(self.masks.bias[0])), float(self.has_mask), asked]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report beside the sampled token; None reports nothing.

        With `best_of`, siblings are ranked by their own log probabilities.
        """
        sampling = self.request.sampling
        asked = bool(sampling.logprob_token_ids) or self.request.num_siblings > sampling.n
        return 0 if sampling.logprobs is None and asked else sampling.logprobs

    @property
    def is_finished(self) -> bool:
        """True if grammar or budget allow no further token."""
        return self.guide is not None and self.guide.finished

    @property
    def has_stopped(self) -> bool:
        """True if the last token ends the answer."""
        return self.tokens[-1] in self.stops and self.num_generated > self.request.sampling.min_tokens

    def append(self, token: int, mu: float | None = None) -> None:
        """Append a token; `mu` is mirostat's after it."""
        self.tokens.append(token)
        self.samplers.append(token, mu)
        if self.guide is not None:
            try:
                self.guide.append(token)
            except GrammarFailed as error:
                self.failure = str(error)

    def instead_of(self, token: int, edited: Array) -> int | None:
        """The token to take in place of this one so that the answer ends validly within its budget, if any."""
        other = self.guide.instead_of(token) if self.guide is not None else None
        if other is None or other == token or edited[other] == NEVER and not self._permits(other, len(edited)):
            return None
        return other

    def _permits(self, token: int, size: int) -> bool:
        """True if the masks allow the token; the grammar, which allows one spelling only, is not asked."""
        zeros = np.zeros(size, dtype=np.float32)
        self.masks.apply(zeros, self.tokens, self.num_prompt)
        return bool(zeros[token] > NEVER)

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on; the prompt stays."""
        if not self.num_prompt <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate {len(self.tokens)} tokens to {length}: {self.num_prompt} are the prompt")
        if self.guide is not None and len(self.tokens) > length:
            self.guide.truncate(len(self.tokens) - length)
            self.failure = None
        self.samplers.truncate(length)
        while len(self.tokens) > length:
            self.penalties.remove(self.tokens.pop())

    def edit(self, logits: Array) -> Array:
        """The logits [V] this row chooses from: the given array where nothing applies, else a changed copy.

        The order is vLLM's: logits_processors, logit_bias, then penalties, DRY's last; the masks commute with all but
        the first.
        """
        if self.failure is not None:
            raise GrammarFailed(self.failure)
        if self.processors:
            logits = apply_processors(
                self.processors, self.tokens[: self.num_prompt], self.tokens[self.num_prompt :], logits
            )
        masked = self.masks.is_active(self.num_generated)
        if not masked and not self.has_penalties and self.guide is None and self.samplers.dry is None:
            return logits
        logits = logits.copy()
        if masked:
            self.masks.apply(logits, self.tokens, self.num_prompt)
        self.penalties.apply(logits)
        self.samplers.edit(logits)
        if self.guide is not None:
            self.guide.mask(logits)
        return logits
