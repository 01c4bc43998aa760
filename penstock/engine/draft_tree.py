"""Draft tokens as a tree: each follows the last known token or an earlier draft token. A line is a tree, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.engine.plan import Draft


def is_line(draft: Sequence[Draft]) -> bool:
    """True if each token follows the one before it."""
    return all(one.parent == i - 1 for i, one in enumerate(draft))


def take_line(draft: Sequence[Draft]) -> list[Draft]:
    """Take the path of first children."""
    line: list[Draft] = []
    last = -1
    for i, one in enumerate(draft):
        if one.parent == last:
            line.append(Draft(one.token, len(line) - 1, one.chance, one.drafter))
            last = i
    return line


def compute_path_chances(draft: Iterable[Draft]) -> list[float]:
    """Compute the chance of each token with all before it on its path; none exceeds its parent's."""
    chances: list[float] = []
    for one in draft:
        before = chances[one.parent] if one.parent >= 0 else 1.0
        chances.append(min(before, before * one.chance))
    return chances


def keep_likeliest(draft: Sequence[Draft], count: int) -> list[Draft]:
    """Keep the `count` likeliest tokens, each with its parent, in their order. Of a line these are the first."""
    if count >= len(draft):
        return list(draft)
    chances = compute_path_chances(draft)
    kept = sorted(sorted(range(len(draft)), key=lambda i: -chances[i])[:count])
    new = {-1: -1} | {old: i for i, old in enumerate(kept)}
    return [Draft(draft[i].token, new[draft[i].parent], draft[i].chance, draft[i].drafter) for i in kept]


def order_depth_first(draft: Sequence[Draft]) -> list[Draft]:
    """Order a tree so that each token is followed by its likeliest child: then that path lies in order."""
    ordered: list[Draft] = []
    open_: list[tuple[int, int]] = [(-1, -1)]  # indices in `draft`, and of the parent in `ordered`
    while open_:
        node, parent = open_.pop()
        if node >= 0:
            ordered.append(Draft(draft[node].token, parent, draft[node].chance, draft[node].drafter))
        children = [i for i, one in enumerate(draft) if one.parent == node]
        children.sort(key=lambda i: (draft[i].chance, -i))
        open_ += [(child, len(ordered) - 1) for child in children]
    return ordered


def find_paths(draft: Sequence[Draft]) -> list[list[int]]:
    """Find the indices from the root to each token, itself included."""
    paths: list[list[int]] = []
    for i, one in enumerate(draft):
        paths.append([*(paths[one.parent] if one.parent >= 0 else ()), i])
    return paths


def find_child(draft: Sequence[Draft], parent: int, token: int) -> int | None:
    """Find the draft of `token` after `parent`; children come after their parents."""
    for i in range(parent + 1, len(draft)):
        if draft[i].parent == parent and draft[i].token == token:
            return i
    return None


def follow(draft: Sequence[Draft], tokens: Iterable[int]) -> list[int]:
    """Return the indices of the draft tokens that `tokens` took, as far as the draft has them."""
    path: list[int] = []
    for token in tokens:
        found = find_child(draft, path[-1] if path else -1, token)
        if found is None:
            break
        path.append(found)
    return path


def find_moves(draft: Sequence[Draft], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Find which states to move, as pairs of indices from where the draft begins, so that the path of `tokens` lies in
    order. The last of the tokens has no state yet. Made one after the other, no move overwrites a later one's source.
    """
    return [(source, target) for target, source in enumerate(follow(draft, tokens[:-1])) if source != target]
