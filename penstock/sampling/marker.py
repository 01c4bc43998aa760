"""A marker's text among tokens: how far the last ones spell it, and which tokens go on with it."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidRequest, shown
from penstock.sampling.arrays import Array
from penstock.sampling.lexicon import Lexicon


class Marker:
    """One marker in one vocabulary. It may be a token of its own, or be spelt by several; a token may spell its end
    and more."""

    def __init__(self, text: str, lexicon: Lexicon) -> None:
        self.text = text.encode()
        self._lexicon = lexicon
        self._overruns: dict[int, Array] = {}
        self._steps: dict[int, Array] = {}
        last = self.text[-1:]
        spelled = ((id, lexicon.spell(id)) for id in range(lexicon.size))
        self._near = [(id, data) for id, data in spelled if data and (data in self.text or last in data)]

    def write(self, before: str = "") -> tuple[int, ...]:
        """Ids that spell the marker behind `before`; its own token, if there is one."""
        special = next((id for id, name in self._lexicon.special.items() if name == self.text), None)
        if special is None:
            path = self._lexicon.cover(before.encode() + self.text)
        else:
            path = self._lexicon.cover(before.encode())
            path = None if path is None else (*path, special)
        if path is None:
            raise InvalidRequest(
                f"the model's tokens cannot spell {shown(self.text.decode())}, which marks its "
                "reasoning: leave thinking_token_budget out, or switch thinking off"
            )
        return path

    def follow(self, matched: int, data: bytes) -> tuple[int, bytes | None]:
        """How many of its bytes are spelt at the end once `data` follows the first `matched`; and, where the whole of
        it is among them, the bytes behind it."""
        text = self.text[:matched] + data
        at = text.find(self.text)
        if at >= 0:
            return 0, text[at + len(self.text) :]
        for count in range(min(len(text), len(self.text) - 1), 0, -1):
            if text.endswith(self.text[:count]):
                return count, None
        return 0, None

    def overruns(self, matched: int) -> Array:
        """Tokens that end the marker and spell more, behind its first `matched` bytes."""
        if matched not in self._overruns:
            self._overruns[matched] = _ids([id for id, data in self._near if self.follow(matched, data)[1]])
        return self._overruns[matched]

    def steps(self, matched: int) -> Array:
        """Tokens that spell the next bytes of the marker, behind its first `matched`, or all of them and more."""
        if matched not in self._steps:
            rest = self.text[matched:]
            self._steps[matched] = _ids(
                [id for id, data in self._near if rest.startswith(data) or data.startswith(rest)]
            )
        return self._steps[matched]


def _ids(found: list[int]) -> Array:
    return np.array(found, dtype=np.int64)
