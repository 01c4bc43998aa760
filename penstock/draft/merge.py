"""Merge the lines of several drafters into one tree (SpecInfer)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.plan import Draft
from penstock.types.speculation import PREDICTION


@dataclass(slots=True)
class DraftNode:
    token: int
    chance: float
    drafter: str
    children: dict[int, DraftNode] = field(default_factory=dict)  # by token


def merge_lines(lines: Sequence[Sequence[Draft]]) -> tuple[Draft, ...]:
    """Merge lines by their common prefixes. Depth first, the likeliest child first: where the likeliest path is
    accepted, nothing has to be moved."""
    lines = [line for line in lines if line]
    if len(lines) < 2:
        return tuple(lines[0]) if lines else ()
    root = DraftNode(-1, 1.0, "")
    for line in lines:
        node = root
        for draft in line:
            child = node.children.get(draft.token)
            if child is None:
                child = node.children[draft.token] = DraftNode(draft.token, draft.chance, draft.drafter)
            else:
                child.chance = max(child.chance, draft.chance)
                child.drafter = draft.drafter if draft.drafter == PREDICTION else child.drafter
            node = child
    tree: list[Draft] = []
    _append(root, -1, tree)
    return tuple(tree)


def _append(node: DraftNode, index: int, tree: list[Draft]) -> None:
    """Append what follows a node. Only one of its children can come true, so each has its chance of what the likelier
    ones leave."""
    left = 1.0
    for child in sorted(node.children.values(), key=lambda child: -child.chance):
        chance = left * child.chance
        left -= chance
        tree.append(Draft(child.token, index, chance, child.drafter))
        _append(child, len(tree) - 1, tree)
