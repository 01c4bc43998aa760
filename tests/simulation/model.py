"""A language model without weights: everything it says is a hash of the prefix its groups can see."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.cache.group import Group
from penstock.types import Logprob, Request, TokenLogprobs

VOCABULARY = 50
Chain = list[int]  # one value per position: a hash of the salt and of every token up to there


def extend(chain: Chain, tokens: Seq[int], salt: str) -> None:
    """Append the values of `tokens`. The salt is part of them, so that a block shared between salts shows."""
    value = chain[-1] if chain else zlib.crc32(salt.encode())
    for token in tokens:
        value = hash((value, token))
        chain.append(value)


def chance(*key: int) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return (hash((*key, 9176)) & 0xFFFFFFFF) / 0x100000000


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: int | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...]
    score: float
    finish_reason: str


class Model:
    """`digest` joins what each group reads at a position; all else follows from it."""

    def __init__(self, groups: Seq[Group]) -> None:
        self.groups = tuple(groups)

    def digest(self, chain: Chain, position: int) -> int:
        """What a query at `position` sees, computed from the prefix itself."""
        return self.join(
            [hash(tuple(self.visible(chain, g, position))) for g in range(len(self.groups))] or [chain[position]]
        )

    def visible(self, chain: Chain, g: int, position: int) -> Chain:
        spec = self.groups[g].spec
        return [chain[position]] if spec.kind == "recurrent" else chain[spec.find_first_needed(position) : position + 1]

    def join(self, parts: Seq[int]) -> int:
        return hash(tuple(parts))

    def token(self, request: Request, sibling: int, digest: int) -> int:
        return hash((digest, request.seed, sibling)) % VOCABULARY

    def logprob(self, digest: int, token: int) -> float:
        return -(hash((digest, token, 3)) % 1_000_003) / 65536

    def candidates(self, request: Request, digest: int) -> tuple[tuple[int, float], ...]:
        """The likeliest next tokens of a beam: twice as many as there are beams, as every one may end one."""
        width = 2 * request.beam.beam_width if request.beam else 0
        tokens = sorted(((token, self.logprob(digest, token)) for token in range(VOCABULARY)), key=lambda c: -c[1])
        return tuple(tokens[:width])

    def described(self, digest: int, token: int) -> TokenLogprobs:
        return {token: Logprob(self.logprob(digest, token))}

    def embedding(self, digest: int) -> tuple[float, ...]:
        return (float(digest % 1009), float(digest % 1013))

    def answer(self, request: Request, sibling: int) -> Answer:
        """What one sibling must answer, computed position by position without any cache."""
        chain: Chain = []
        extend(chain, request.tokens, request.salt)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while True:
            digest = self.digest(chain, len(chain) - 1)
            token = self.token(request, sibling, digest)
            tokens.append(token)
            logprobs.append(self.described(digest, token))
            extend(chain, [token], request.salt)
            if token in request.stop_token_ids and len(tokens) > request.sampling.min_tokens:
                ends_by_itself = token in request.eos_token_ids and not request.sampling.ignore_eos
                reason = None if ends_by_itself else token
                return Answer(tuple(tokens), "stop", reason, tuple(logprobs))
            if len(tokens) == request.max_tokens:
                return Answer(tuple(tokens), "length", None, tuple(logprobs))

    def prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...]:
        chain: Chain = []
        extend(chain, request.tokens, request.salt)
        return (None, *(self.described(self.digest(chain, i - 1), request.tokens[i]) for i in range(1, len(chain))))

    def pooled(self, request: Request) -> tuple[float, ...]:
        chain: Chain = []
        extend(chain, request.tokens, request.salt)
        return self.embedding(self.digest(chain, len(chain) - 1))

    def beams(self, request: Request) -> list[Beam]:
        """Beam search by the book: expand all, keep the best, set aside what ends."""
        params = request.beam
        assert params is not None
        live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        ended: list[Beam] = []
        for length in range(1, params.max_tokens + 1):
            expanded = []
            for score, tokens in live:
                chain: Chain = []
                extend(chain, request.tokens + tokens, request.salt)
                for token, logprob in self.candidates(request, self.digest(chain, len(chain) - 1)):
                    expanded.append((score + logprob, (*tokens, token)))
            expanded.sort(key=lambda beam: -beam[0])
            live = []
            for score, tokens in expanded:
                if len(live) == params.beam_width:
                    break
                if tokens[-1] in request.stop_token_ids:
                    ended.append(Beam(tokens, score, "stop"))
                elif length == params.max_tokens:
                    live.append((score, tokens))
                    ended.append(Beam(tokens, score, "length"))
                else:
                    live.append((score, tokens))
        ended.sort(key=lambda beam: -beam.score / len(beam.tokens) ** params.length_penalty)
        return ended[: params.beam_width]
