"""What sampling must know of one sequence on the device."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sampling.likeliest import Array
from penstock.sampling.masks import Masks
from penstock.sampling.penalties import Penalties
from penstock.types import Request


class RowState:
    """One row: filled at admission, extended by every token that is kept."""

    def __init__(self, request: Request, sibling: int, tokens: Sequence[int], num_prompt: int) -> None:
        self.request = request
        self.sibling = sibling
        self.num_prompt = num_prompt
        self.tokens = list(tokens)
        self._masks = Masks(request)
        self._penalties = Penalties(request.sampling, self.tokens[:num_prompt], self.tokens[num_prompt:])
        self._counts = self._penalties.active
        sampling = request.sampling
        self.unfiltered = (sampling.top_k <= 0 and sampling.min_p <= 0 and sampling.top_p >= 1
                           and sampling.typical_p >= 1)
        # Nothing is asked but the likeliest token.
        self.plain = (sampling.greedy and request.beam is None and self.num_logprobs is None
                      and not self._masks.ever and not self._counts)

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

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self._counts:
            self._penalties.add(token)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the prompt is never forgotten."""
        if not self.num_prompt <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate {len(self.tokens)} tokens to {length}: {self.num_prompt} are the prompt")
        while len(self.tokens) > length:
            self._penalties.remove(self.tokens.pop())

    def edit(self, logits: Array) -> Array:
        """The logits [V] this row chooses from: the given array where nothing applies, else a changed copy.

        The order is vLLM's: logit_bias, then penalties; the masks commute with both.
        """
        masked = self._masks.active(self.num_generated)
        if not masked and not self._counts:
            return logits
        logits = logits.copy()
        if masked:
            self._masks.apply(logits, self.tokens, self.num_prompt)
        self._penalties.apply(logits)
        return logits
