"""Trees of draft tokens from a drafting model: level by level, each node continued by its likeliest tokens.

The first child of a node is the token that the row would draw there, as in a line. The others are the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.draft_tree import compute_path_chances, keep_likeliest, order_depth_first
from penstock.engine.plan import Draft
from penstock.runner.cpu.draft_lines import NUM_GRADES, Line, LineMaker
from penstock.sampling.logits import Array

BREADTH = 3  # children of a node
WIDTH = 4  # nodes of a level that are continued


class BranchMaker:
    """Grows the trees of a step. The nodes of `line.drafts` stand in the order in which they were made."""

    def __init__(self, lines: LineMaker) -> None:
        self._lines = lines

    def grow(self, line: Line, node: int, logits: Array, likeliest: int) -> None:
        """Add children to a node (-1: the last known token) from logits [V] that follow it."""
        lines, state, place = self._lines, line.device.state, self._enter(line, node)
        if state.is_finished or state.has_stopped:
            return
        logits, likeliest = lines.map_logits(logits, likeliest)
        drawn = lines.draw(line, logits, likeliest)
        if drawn is None or not np.isfinite(logits[drawn[0]]):
            return
        children = self._rank(logits, drawn[0]) if state.guide is None else [drawn[0]]  # a guide must allow each
        shares = lines.find_shares(logits, likeliest, children)
        before = line.paths[node] if node >= 0 else 1.0
        left = 1.0
        for i, (token, share) in enumerate(shares.items()):
            grade = min(NUM_GRADES - 1, int(NUM_GRADES * share)) + (NUM_GRADES if i else 0)
            chance = min(left, lines.judge.estimate(line.own, grade, place))
            left = max(0.0, left - chance)
            line.own.pending.append((token, grade, node))
            line.drafts.append(Draft(token, node, chance, lines.judge.name))
            line.paths.append(before * chance)
            line.mus.append(drawn[1] if not i else state.samplers.mu)

    def _rank(self, logits: Array, first: int) -> list[int]:
        """Return the token `first` and the likeliest others."""
        count = min(BREADTH, len(logits))
        best = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
        best = best[np.lexsort((best, -logits[best]))]
        others = [int(token) for token in best if token != first and np.isfinite(logits[token])]
        return [first, *others][:BREADTH]

    def _enter(self, line: Line, node: int) -> int:
        """Put the row's state behind a node; returns the number of draft tokens before its children."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = line.drafts[node].parent
        state = line.device.state
        state.truncate(line.length)
        for one in reversed(path):
            state.append(line.drafts[one].token, line.mus[one])
        return len(path)

    def choose(self, line: Line, since: int, min_chance: float, room: int) -> list[int]:
        """Choose at most `room` nodes made since `since` to continue, likeliest first, from the line's `most`
        likeliest."""
        least = sorted(line.paths, reverse=True)[line.most - 1] if len(line.paths) >= line.most else 0.0
        found = [i for i in range(since, len(line.drafts)) if line.paths[i] >= max(least, min_chance)]
        found.sort(key=lambda i: (-line.paths[i], i))
        return sorted(found[: min(WIDTH, room)])

    def finish(self, lines: Sequence[Line], min_chance: float) -> None:
        """Keep what each tree is worth verifying, the likeliest path first."""
        for line in lines:
            kept = keep_likeliest(line.drafts, min(line.most, sum(path >= min_chance for path in line.paths)))
            line.drafts = order_depth_first(kept)
            line.worth = sum(compute_path_chances(line.drafts))
