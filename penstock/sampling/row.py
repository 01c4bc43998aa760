"""What sampling must know of one sequence on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import InvalidRequest
from penstock.ops.wishes import MOST_BIASED, MOST_COUNTED, MOST_LOGPROBS, NEUTRAL
from penstock.sampling.arrays import Array
from penstock.sampling.extras import extra_numbers
from penstock.sampling.grammar import GrammarFailed
from penstock.sampling.grammars import Grammars
from penstock.sampling.guide import Guide
from penstock.sampling.masks import MOST_TOKENS, NEVER, Masks
from penstock.sampling.penalties import Penalties
from penstock.sampling.processors import apply_processors
from penstock.sampling.samplers import Samplers
from penstock.sampling.thinking import ReasoningGuide
from penstock.types import Request

STRONGEST = 1e38  # a penalty that float32 holds


class RowState:
    """One row: filled at admission, extended by every token that is kept."""

    def __init__(
        self,
        request: Request,
        sibling: int,
        tokens: Sequence[int],
        num_prompt: int,
        grammars: Grammars | None = None,
        mu: float | None = None,
    ) -> None:
        """`mu` is mirostat's after those tokens, where they are not only the prompt."""
        self.request = request
        self.sibling = sibling
        self.num_prompt = num_prompt
        self.tokens = list(tokens)
        self._masks = Masks(request)
        self._processors = request.sampling.logits_processors or ()
        self._penalties = Penalties(request.sampling, self.tokens, num_prompt)
        self._counts = self._penalties.active
        self.samplers = Samplers(request, self.tokens, mu)
        self.failure: str | None = None  # why no more tokens can be chosen
        self.guide = self._guide(grammars)
        sampling = request.sampling
        self.unfiltered = (
            sampling.top_k <= 0
            and sampling.min_p <= 0
            and sampling.top_p >= 1
            and sampling.typical_p >= 1
            and sampling.top_n_sigma <= 0
            and not sampling.has_xtc
            and sampling.dynatemp_range <= 0
            and not sampling.mirostat
        )
        # Nothing is asked but a temperature.
        self.simple = (self.unfiltered or sampling.greedy) and self._is_plain()
        # A GPU can choose by itself, unless a grammar is near its end.
        self.on_device = self.simple or self._suits_device()
        # Nothing is asked but the likeliest token.
        self.plain = sampling.greedy and self._is_plain()

    def _is_plain(self) -> bool:
        return (
            self.request.beam is None
            and self.num_logprobs is None
            and not self._masks.ever
            and not self._counts
            and self.request.sampling.structured_outputs is None
            and self.request.reasoning is None
            and not self._processors
            and self.samplers.dry is None
        )

    def _suits_device(self) -> bool:
        sampling = self.request.sampling
        return (
            self.request.beam is None
            and not self._processors
            and (sampling.greedy or sampling.typical_p >= 1)
            and (self.num_logprobs or 0) <= MOST_LOGPROBS
            and len(self._masks.bias[0]) <= MOST_BIASED
            and not (self._counts and (self._penalties.window or 0) > MOST_COUNTED // 2)
        )

    def _guide(self, grammars: Grammars | None) -> Guide | ReasoningGuide | None:
        """Where the answer stands in its reasoning and its grammar, with the tokens it already has."""
        asked, block = self.request.sampling.structured_outputs, self.request.reasoning
        if asked is None and block is None or self.request.beam is not None:
            return None
        try:
            if grammars is None:
                raise InvalidRequest(
                    "structured_outputs and thinking_token_budget need a tokenizer: do not set skip_tokenizer_init"
                )
            guide: Guide | ReasoningGuide
            if block is not None:
                guide = ReasoningGuide(self.request, block, grammars)
            else:
                assert asked is not None
                guide = Guide(grammars.compile(asked), self.request)
            for token in self.tokens[self.num_prompt :]:
                guide.append(token)
            return guide
        except (InvalidRequest, GrammarFailed) as error:
            self.failure = str(error)
            return None

    @property
    def free(self) -> bool:
        """Whether the row's own tokens ask for nothing that only a host does."""
        return self.failure is None and (self.guide is None or self.guide.free)

    @property
    def asks_device(self) -> bool:
        """Whether a GPU chooses by itself, and from more than a temperature."""
        return self.on_device and not self.simple

    @property
    def asks_window(self) -> bool:
        """True if penalties look back on some tokens only."""
        return self._counts and self._penalties.window is not None

    @property
    def asks_extras(self) -> bool:
        """True if a GPU samples this row with the rarer samplers."""
        sampling = self.request.sampling
        drawn = (
            self.samplers.mu is not None or sampling.top_n_sigma > 0 or sampling.has_xtc or sampling.dynatemp_range > 0
        )
        return self.asks_device and (self.samplers.dry is not None or self.asks_window or drawn and not sampling.greedy)

    def extras(self) -> list[float]:
        """The columns of `ops.extras`."""
        window = self._penalties.window or 0 if self.asks_window else 0
        return extra_numbers(self.request.sampling, self.samplers.mu, window, self.num_prompt)

    @property
    def counted_from(self) -> int:
        """Where the tokens begin that penalties count."""
        return self._penalties.first

    @property
    def masked(self) -> bool:
        return self._masks.forbid or self.guide is not None

    def late_at(self, num_generated: int) -> bool:
        """True if the mask after so many tokens depends on all of them."""
        return self._masks.late or self.guide is not None and self.guide.late_at(num_generated)

    @property
    def penal(self) -> bool:
        return self._counts

    def stage(self, num_generated: int) -> int:
        """Words of the same stage are the same, unless they are late."""
        return -1 if self.late_at(num_generated) else self._masks.stage(num_generated)

    def words(self, num_generated: int, size: int) -> Array:
        """Which tokens may come next, as bits; raises GrammarFailed."""
        if self.guide is not None and self.guide.forced is not None:
            return self.guide.words(size)
        words = self._masks.words(self.tokens, self.num_prompt, num_generated, size)
        return words if self.guide is None else words & self.guide.words(size)

    def wishes(self) -> list[float]:
        """The columns of `ops.wishes`; greedy rows need no filters, and those that only the host knows nothing."""
        if not self.asks_device:
            return list(NEUTRAL)
        sampling = self.request.sampling
        filters = (
            [0.0, 1.0, 0.0]
            if sampling.greedy or self.samplers.mu is not None
            else [float(min(max(0, sampling.top_k), MOST_TOKENS)), float(sampling.top_p), float(sampling.min_p)]
        )
        asked = 0.0 if self.num_logprobs is None else self.num_logprobs + 1.0
        strengths = (min(strength, STRONGEST) for strength in self._penalties.strengths)
        return [*filters, *strengths, float(len(self._masks.bias[0])), float(self.masked), asked]

    @property
    def bias(self) -> tuple[Array, Array]:
        return self._masks.bias

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report beside the chosen token; None reports nothing.

        Where the best of more siblings than asked for are kept, each one's own log probabilities decide.
        """
        sampling = self.request.sampling
        if sampling.logprobs is None and self.request.num_siblings > sampling.n:
            return 0
        return sampling.logprobs

    @property
    def finished(self) -> bool:
        """Whether the answer is all that its grammar, or what is left of its budget, allows."""
        return self.guide is not None and self.guide.finished

    def append(self, token: int, mu: float | None = None) -> None:
        """`mu` is mirostat's after the token."""
        self.tokens.append(token)
        self.samplers.append(token, mu)
        if self._counts:
            self._penalties.add(token)
        if self.guide is not None:
            try:
                self.guide.append(token)
            except GrammarFailed as error:
                self.failure = str(error)

    def instead_of(self, token: int, edited: Array) -> int | None:
        """A token to take in place of this one, so that the answer ends validly within its budget."""
        other = self.guide.instead_of(token) if self.guide is not None else None
        if other is None or other == token or edited[other] == NEVER and not self._permits(other, len(edited)):
            return None
        return other

    def _permits(self, token: int, size: int) -> bool:
        """Whether anything but the grammar rules the token out: that allows one spelling only of what must follow."""
        zeros = np.zeros(size, dtype=np.float32)
        self._masks.apply(zeros, self.tokens, self.num_prompt)
        return bool(zeros[token] > NEVER)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the prompt is never forgotten."""
        if not self.num_prompt <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate {len(self.tokens)} tokens to {length}: {self.num_prompt} are the prompt")
        if self.guide is not None and len(self.tokens) > length:
            self.guide.truncate(len(self.tokens) - length)
            self.failure = None
        self.samplers.truncate(length)
        while len(self.tokens) > length:
            self._penalties.remove(self.tokens.pop())

    def edit(self, logits: Array) -> Array:
        """The logits [V] this row chooses from: the given array where nothing applies, else a changed copy.

        The order is vLLM's: logits_processors, logit_bias, then penalties, DRY's last; the masks commute with all but
        the first.
        """
        if self.failure is not None:
            raise GrammarFailed(self.failure)
        if self._processors:
            logits = apply_processors(
                self._processors, self.tokens[: self.num_prompt], self.tokens[self.num_prompt :], logits
            )
        masked = self._masks.active(self.num_generated)
        if not masked and not self._counts and self.guide is None and self.samplers.dry is None:
            return logits
        logits = logits.copy()
        if masked:
            self._masks.apply(logits, self.tokens, self.num_prompt)
        self._penalties.apply(logits)
        self.samplers.edit(logits)
        if self.guide is not None:
            self.guide.mask(logits)
        return logits
