"""Stop strings over streamed text: what may be shown now, and where the answer ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Trie:
    """The stop strings as an Aho-Corasick automaton: one move per character, whatever the number of strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of the longest stop-string beginning the text ends with
        self.matched: list[str | None] = [None]  # the longest stop string the text ends with
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.matched.append(None)
            node = self.children[node][char]
        self.matched[node] = string

    def _link(self) -> None:
        self.fallback = [0] * len(self.children)
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.fallback[child] = self.move(self.fallback[node], char)
                queue.append(child)
            if self.matched[node] is None:
                self.matched[node] = self.matched[self.fallback[node]]

    def move(self, node: int, char: str) -> int:
        while node and char not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(char, 0)


class StopStrings:
    """Text in, text safe to show out; `matched` names the stop string once one is complete.

    The first stop string to become complete, reading character by character, ends the text; of several complete at
    the same character the longest does. So the result does not depend on how the text was cut into deltas, and
    nothing waits for a longer stop string once a shorter one is there. Held back is only what a stop string may begin
    with.
    """

    def __init__(self, stop: Sequence[str] = (), include: bool = False) -> None:
        self.include = include
        self.matched: str | None = None
        self._trie = _Trie(stop) if stop else None
        self._node = 0
        self._held = ""

    def push(self, delta: str, watch: bool = True) -> str:
        """The text that may be shown after `delta`. With `watch=False` (fewer than min_tokens so far) strings that
        become complete in this delta are passed over."""
        if self._trie is None or self.matched is not None:
            return "" if self.matched is not None else delta
        text, start = self._held + delta, len(self._held)
        for end, char in enumerate(delta, start + 1):
            self._node = self._trie.move(self._node, char)
            found = self._trie.matched[self._node]
            if found is not None and watch:
                self.matched, self._held = found, ""
                return text[:end] if self.include else text[: end - len(found)]
        safe = len(text) - self._trie.depth[self._node]
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The held text, once no more will come."""
        held, self._held, self._node = self._held, "", 0
        return held
