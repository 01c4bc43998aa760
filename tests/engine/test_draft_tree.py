"""Trees of draft tokens: which tokens are kept, what each of them follows, and what is moved when some are accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.engine.draft_tree import (
    compute_path_chances,
    find_child,
    find_moves,
    find_paths,
    follow,
    is_line,
    keep_likeliest,
    take_line,
)
from penstock.engine.plan import Draft
from penstock.engine.scheduling.speculation import SpeculationController
from tests.engine.stage import Stage
from tests.simulation.forward import Drafting

TREE = [  # two branches below the first token, and another first token
    Draft(10, -1, 0.8),
    Draft(11, 0, 0.5),
    Draft(12, 1, 0.9),
    Draft(13, 0, 0.4),
    Draft(14, 3, 0.1),
    Draft(20, -1, 0.2),
]


def draw(rng: random.Random) -> list[Draft]:
    return [Draft(rng.randrange(4), rng.randrange(-1, i), rng.random()) for i in range(rng.randrange(12))]


def test_paths_and_chances() -> None:
    assert find_paths(TREE) == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5]]
    assert compute_path_chances(TREE) == pytest.approx([0.8, 0.4, 0.36, 0.32, 0.032, 0.2])
    assert not is_line(TREE) and is_line(TREE[:3]) and is_line([])


def test_the_likeliest_are_kept_with_their_parents() -> None:
    kept = keep_likeliest(TREE, 4)
    assert [(one.token, one.parent) for one in kept] == [(10, -1), (11, 0), (12, 1), (13, 0)]
    kept = keep_likeliest([Draft(1, -1, 0.1), Draft(2, -1, 0.9), Draft(3, 1, 0.5)], 2)
    assert [(one.token, one.parent) for one in kept] == [(2, -1), (3, 0)]
    rng = random.Random(1)
    for _ in range(200):
        draft, count = draw(rng), rng.randrange(6)
        kept = keep_likeliest(draft, count)
        assert len(kept) == min(count, len(draft)) and all(one.parent < i for i, one in enumerate(kept))
        rest = sorted(compute_path_chances(draft), reverse=True)
        assert sorted(compute_path_chances(kept), reverse=True) == pytest.approx(rest[: len(kept)])


def test_a_line_is_the_path_of_first_children() -> None:
    assert [(one.token, one.parent) for one in take_line(TREE)] == [(10, -1), (11, 0), (12, 1)]
    assert take_line(TREE[5:]) == [Draft(20, -1)] and take_line([]) == []
    rng = random.Random(2)
    assert all(is_line(take_line(draw(rng))) for _ in range(100))


def test_what_was_accepted_is_moved_into_order() -> None:
    assert follow(TREE, [10, 13, 14, 99]) == [0, 3, 4] and follow(TREE, [7]) == []
    assert find_moves(TREE, [10, 13, 14, 99]) == [(3, 1), (4, 2)]
    assert find_moves(TREE, [20, 5]) == [(5, 0)] and find_moves(TREE, [10, 11, 12]) == []
    assert find_moves(TREE, [20]) == find_moves(TREE, ()) == []  # the last token has no state yet
    assert find_child(TREE, 0, 13) == 3 and find_child(TREE, 3, 13) is None
    rng = random.Random(3)
    for _ in range(200):
        draft = draw(rng)
        path = rng.choice(find_paths(draft) or [[]])
        tokens, places = [draft[i].token for i in path], list(range(len(draft)))
        took = follow(draft, tokens)
        for source, target in find_moves(draft, [*tokens, 99]):
            places[target] = places[source]
        assert places[: len(took)] == took


def test_the_controller_takes_nodes_by_their_paths() -> None:
    """Beside a prompt, nodes whose path is likelier than not."""
    assert SpeculationController().choose([TREE, [Draft(1, -1, 0.6), Draft(2, -1, 0.7)]], 3, 32, True) == [1, 2]
    assert SpeculationController().choose([TREE], 1, 32, False) == [6]


@pytest.mark.parametrize("trees", [True, False])
def test_all_nodes_count(trees: bool) -> None:
    """Blocks and the budget are for nodes, not for the depth of a tree; without the ability, for a line."""
    stage = Stage(num_blocks=400, max_num_batched_tokens=12, drafting=Drafting(1.0, 8, 0.9), trees=trees)
    for _ in range(3):
        stage.add(5, max_tokens=60)
    stage.run()
    drafts = [row.draft for plan in stage.plans for row in plan.rows]
    assert any(not is_line(draft) for draft in drafts) == trees
    assert max(plan.num_tokens for plan in stage.plans) == 12
    assert (stage.device.tally.num_path_moves > 0) == trees


@pytest.mark.parametrize("trees", [True, False])
def test_the_controller_is_shown_what_can_be_verified(trees: bool) -> None:
    """Breaks when it pays for branches that are then cut away."""
    seen: list[list[Draft]] = []

    class Watching(SpeculationController):
        def choose(self, drafts: Sequence[Sequence[Draft]], num_rows: int, room: int, is_mixed: bool) -> list[int]:
            seen.extend(map(list, drafts))
            return [len(draft) for draft in drafts]

    stage = Stage(num_blocks=400, drafting=Drafting(1.0, 8, 0.9), trees=trees)
    stage.scheduler._speculation = Watching()
    stage.add(5, max_tokens=60)
    stage.run()
    assert seen and all(map(is_line, seen)) != trees
