"""Bugs to be planted in the core, as edits of its source: what each is, where, and the text before and after."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    path: str  # under penstock/
    old: str  # stands there exactly once
    new: str


@dataclass(frozen=True)
class Bug:
    name: str
    edits: tuple[Edit, ...]


def bug(name: str, path: str, old: str, new: str) -> Bug:
    return Bug(name, (Edit(path, old, new),))


POOL = [
    bug(
        "limbo ignored: a block is reused while a started plan names it",
        "cache/pool.py",
        "if self._busy[block] > self.ended:",
        "if False:",
    ),
    bug("limbo ends one plan too early", "cache/pool.py", "if number <= plan]", "if number <= plan + 1]"),
    Bug(
        "a block in use is evicted",
        (
            Edit("cache/radix.py", "return all(self.pool.refs[block] == 1 for", "return all(True for"),
            Edit(
                "cache/pool.py", "if not self._cached[block] or self.refs[block] != 1:", "if not self._cached[block]:"
            ),
        ),
    ),
    bug(
        "idle blocks are miscounted when one is shared again",
        "cache/pool.py",
        "if refs[block] == 1 and cached[block]:\n                self.num_idle -= 1",
        "if False:\n                self.num_idle -= 1",
    ),
]

TREE = [
    bug(
        "a locked node is evicted",
        "cache/radix.py",
        "return not node.children and not node.pins and all(self.is_idle",
        "return all(self.is_idle",
    ),
    bug(
        "a use does not make a prefix younger",
        "cache/radix.py",
        "for node in path:\n            node.used = self._clock",
        "for node in path:\n            pass",
    ),
    bug(
        "prefixes are shared between salts",
        "cache/radix.py",
        "known else self._roots.get(root.base)",
        "known else next(iter(self._roots.values()), None)",
    ),
    bug(
        "a path of before an eviction is taken",
        "cache/radix.py",
        "last[1:4] != (len(tokens), root, self._tree.version)",
        "last[1:3] != (len(tokens), root)",
    ),
    bug("a window's usable prefix is off by one", "cache/group.py", "run >= needed", "run >= needed - 1"),
    bug(
        "a window is one position too narrow",
        "cache/group.py",
        "return max(0, position - self.window + 1)",
        "return max(0, position - self.window + 2)",
    ),
    bug(
        "the last token is taken from the cache",
        "cache/radix.py",
        "self._tree.match(root, tokens, len(tokens) - 1, self",
        "self._tree.match(root, tokens, None, self",
    ),
    bug(
        "a partial block is shared",
        "cache/kv.py",
        "size, previous = self.block_size, holding.node",
        "size, previous, computed = self.block_size, holding.node, computed + 1",
    ),
    bug(
        "a lost pin: a fork does not lock its place",
        "cache/kv.py",
        "child.node = node\n            self.tree.pin(node)",
        "child.node = node",
    ),
    bug(
        "a pin is never given back",
        "cache/kv.py",
        "self.tree.unpin(holding.node)\n            holding.node = None",
        "holding.node = None",
    ),
    bug(
        "an equal block is taken over and ours not released",
        "cache/kv.py",
        "            self.pool.release(ours, holding.plan)\n",
        "",
    ),
    bug(
        "the device is not told of a block taken over",
        "cache/kv.py",
        "holding.tables[g][index] = holding.changed[g][index] = theirs[0]",
        "holding.tables[g][index] = theirs[0]",
    ),
]

BLOCKS = [
    bug(
        "copy-on-write is skipped",
        "cache/kv.py",
        "if self.pool.refs[table[index]] > 1]",
        "if self.pool.refs[table[index]] > 9]",
    ),
    bug(
        "a copied block's contents are not moved",
        "cache/kv.py",
        "                self.copies.add(shared, table[index], holding)\n",
        "",
    ),
    bug(
        "moves are out of order",
        "engine/scheduling/plan_builder.py",
        "Move(copy.source, copy.target) for copy in copies",
        "Move(copy.source, copy.target) for copy in reversed(copies)",
    ),
    bug(
        "a resumed state is not copied from its snapshot",
        "cache/holding.py",
        "                    self._copies.add(source, target, holding)\n",
        "",
    ),
    bug(
        "a snapshot of an unfinished or failed plan is kept",
        "cache/holding.py",
        "        for snapshot in holding.snapshots:\n            self._release",
        "        self.keep(holding, holding.plan)\n        for snapshot in []:\n            self._release",
    ),
    bug(
        "snapshots fill the whole pool",
        "cache/holding.py",
        "max(pool.num_blocks // MAX_SHARE, self.state_blocks)",
        "pool.num_blocks",
    ),
    bug(
        "a snapshot that a sequence resumes from is dropped for room",
        "cache/holding.py",
        "if self._tree.is_idle(node, g):",
        "if True:",
    ),
    bug(
        "a recurrent row straddles two blocks",
        "cache/group.py",
        "-(-spec.num_rows * len(layers) // (block_bytes // spec.row_bytes))",
        "-(-spec.bytes_per_state * len(layers) // block_bytes)",
    ),
    bug(
        "blocks for positions written ahead are not taken",
        "cache/kv.py",
        "return -(-(end + self.groups[g].ahead) // self.block_size)",
        "return -(-end // self.block_size)",
    ),
    bug(
        "a snapshot is filed under the position after the step",
        "engine/scheduling/plan_builder.py",
        "self.cache.snapshots.take(holding, start, self.number)",
        "self.cache.snapshots.take(holding, end, self.number)",
    ),
    bug(
        "a window is trimmed one block too early",
        "cache/kv.py",
        "self.groups[g].spec.find_first_needed(position) // self.block_size)\n            for",
        "self.groups[g].spec.find_first_needed(position) // self.block_size + 1)\n            for",
    ),
    bug(
        "a window is trimmed as if started plans had ended",
        "engine/scheduling/waiting.py",
        "self.cache.trim(sequence.held, sequence.settled)",
        "self.cache.trim(sequence.held, sequence.computed)",
    ),
    bug(
        "a block that was forked since is written as if it were its own",
        "cache/kv.py",
        "        parent.steady_until = 0\n",
        "",
    ),
    bug("copies of a released sequence are still made", "cache/kv.py", "        self.copies.drop(holding)\n", ""),
    bug(
        "blocks are released without the plan that names them",
        "cache/kv.py",
        "self.pool.release_all(reversed(table[holding.first[g] :]), holding.plan)",
        "self.pool.release_all(reversed(table[holding.first[g] :]), -1)",
    ),
]

ROSTER = [
    bug(
        "an abort in the middle of a prompt releases nothing",
        "engine/scheduling/roster.py",
        "self.cache.release(sequence.held)",
        "self.cache.release(sequence.held) if sequence.num_output else None",
    ),
    bug(
        "preemption releases a block twice",
        "engine/scheduling/waiting.py",
        "victim.num_preempted += 1\n",
        "victim.num_preempted += 1\n        self.cache.pool.release(victim.held.tables[0][-1])\n",
    ),
    bug(
        "an aborted prefix is awaited for ever",
        "engine/scheduling/roster.py",
        "self._forget(sequence, len(sequence.keys))",
        "sequence.keys = []",
    ),
    bug("a row is given to two sequences", "engine/scheduling/roster.py", "self.rows.pop()", "self.rows[-1]"),
    bug(
        "a finished request's id stays in use",
        "engine/scheduling/roster.py",
        "if all(other.done for",
        "if False and all(other.done for",
    ),
]

SCHEDULER = [
    bug(
        "the budget is one token too large",
        "engine/scheduling/scheduler.py",
        "_schedule_running(self.max_num_batched_tokens)",
        "_schedule_running(self.max_num_batched_tokens + 1)",
    ),
    bug(
        "decoding rows are not kept back from long prompts",
        "engine/scheduling/scheduler.py",
        "budget if sequence in short else budget - kept",
        "budget",
    ),
    bug(
        "prompts are not capped beside decode rows",
        "engine/scheduling/scheduler.py",
        "budget = min(budget, kept + self._cap",
        "_ = min(budget, kept + self._cap",
    ),
    bug(
        "an embedding waits for a cap that it never fits",
        "engine/scheduling/scheduler.py",
        "if backlog and not any(s.request.pool for s in waiting):",
        "if backlog:",
    ),
    bug(
        "priorities are reversed",
        "engine/scheduling/policy.py",
        "return (sequence.request.priority, sequence.number",
        "return (-sequence.request.priority, sequence.number",
    ),
    bug(
        "equals are displaced",
        "engine/scheduling/waiting.py",
        "if s.request.priority > head.request.priority]",
        "if s.request.priority >= head.request.priority]",
    ),
    bug(
        "sjf starves the long ones",
        "engine/scheduling/policy.py",
        "overdue = sequence.passed >= PASSES",
        "overdue = False",
    ),
    bug(
        "overtaking is not counted",
        "engine/scheduling/waiting.py",
        "other.passed += other.number < sequence.number",
        "other.passed += 0",
    ),
    bug(
        "a small request passes a large one that finds no room",
        "engine/scheduling/waiting.py",
        "            if not count:\n                return\n            budget -= count",
        "            if not count:\n                continue\n            budget -= count",
    ),
    bug(
        "the victim is the one that loses the most",
        "engine/scheduling/waiting.py",
        "(not losses[s], losses[s], tuple",
        "(not losses[s], -losses[s], tuple",
    ),
    bug(
        "a preempted sequence returns to no more room than before",
        "engine/scheduling/capacity.py",
        "<< min(sequence.num_preempted, 20)",
        "<< 0",
    ),
    bug(
        "the reserve forgets who runs already",
        "engine/scheduling/capacity.py",
        "if self.reserve else self.growth()",
        "if False else 0",
    ),
    bug(
        "a request one block larger than the cache is accepted",
        "engine/scheduling/capacity.py",
        "if blocks > self.cache.pool.num_blocks:",
        "if blocks > self.cache.pool.num_blocks + 1:",
    ),
    bug(
        "a common prefix is computed twice",
        "engine/scheduling/waiting.py",
        "return prefixes.is_awaited(sequence, hit, chain)",
        "return False",
    ),
    bug(
        "rows of one plan read each other",
        "engine/scheduling/plan_builder.py",
        "        self._shared.append(sequence)\n",
        "        self._share(sequence)\n",
    ),
    bug(
        "a sibling is forked one position too early",
        "engine/scheduling/waiting.py",
        "self.cache.fork(leader.holding, last, at_end",
        "self.cache.fork(leader.holding, max(0, last - 1), at_end",
    ),
    bug(
        "a pooled prompt is cut",
        "engine/scheduling/waiting.py",
        "whole = not sequence.request.pool or",
        "whole = True or",
    ),
    bug(
        "a returning sequence is admitted with its prompt alone",
        "engine/scheduling/plan_builder.py",
        "tuple(sequence.tokens) if sequence.num_output else",
        "sequence.request.tokens if sequence.num_output else",
    ),
    bug(
        "drafts run past the limit",
        "engine/scheduling/plan_builder.py",
        "sequence.limit - len(sequence.tokens) - sequence.expected - 1)",
        "sequence.limit - len(sequence.tokens) - sequence.expected + 3)",
    ),
    bug(
        "a state that cannot go back gets drafts",
        "engine/scheduling/plan_builder.py",
        "if not sequence.draft or self.cache.recurrent:",
        "if not sequence.draft:",
    ),
    bug(
        "overlap is one plan too deep",
        "engine/engine.py",
        "while len(self._started) <= self.overlap and",
        "while len(self._started) <= self.overlap + 1 and",
    ),
]

ACCOUNTS = [
    bug(
        "a sequence that something happened to goes on unseen",
        "engine/scheduling/accounts.py",
        "        sequence.held.steady_until = 0\n",
        "",
    ),
    bug(
        "a sequence goes on past the room that it has",
        "engine/scheduling/fast_path.py",
        "until = min(until, len(table) * size - ahead)",
        "until = min(until, len(table) * size - ahead + 1)",
    ),
    bug(
        "`computed` is not rolled back after rejected drafts",
        "engine/scheduling/accounts.py",
        "sequence.computed -= max(0, flight.expected - len(outcome.tokens))",
        "sequence.computed -= 0",
    ),
    bug(
        "every draft is accepted",
        "engine/scheduling/accounts.py",
        "self._accept(sequence, outcome.tokens, ",
        "self._accept(sequence, tuple(d.token for d in row.draft) + outcome.tokens[-1:], ",
    ),
    bug(
        "a result of an earlier epoch is accepted",
        "engine/scheduling/accounts.py",
        "if sequence.epoch != entry.epoch:",
        "if sequence.done:",
    ),
    bug(
        "min_tokens is ignored",
        "engine/scheduling/accounts.py",
        " and sequence.num_output > request.sampling.min_tokens",
        "",
    ),
    bug(
        "a stop token does not end the answer",
        "engine/scheduling/accounts.py",
        "if token in request.stop_token_ids and",
        "if token in request.eos_token_ids and",
    ),
    bug(
        "an answer is one token too long",
        "engine/scheduling/accounts.py",
        "if len(sequence.tokens) >= sequence.limit:",
        "if len(sequence.tokens) > sequence.limit:",
    ),
    bug(
        "prompt log probabilities are repeated after a preemption",
        "engine/scheduling/accounts.py",
        "sequence.prompt_logprobs.extend(outcome.prompt_logprobs[known:])",
        "sequence.prompt_logprobs.extend(outcome.prompt_logprobs)",
    ),
    bug(
        "a poisonous request is not isolated",
        "engine/scheduling/accounts.py",
        "sequence.suspect = max(sequence.suspect, end)",
        "sequence.suspect = 0",
    ),
    bug(
        "a failed step of two ends both",
        "engine/scheduling/accounts.py",
        "if len(started.entries) == 1 else None",
        "if len(started.entries) <= 2 else None",
    ),
    bug(
        "who relied on a failed plan's copies goes on",
        "engine/scheduling/accounts.py",
        "s in rowed or s.holding in started.copied]",
        "s in rowed]",
    ),
    bug(
        "what a failed plan was to compute stays in the tree",
        "engine/scheduling/accounts.py",
        "        self.cache.tree.drop(uncomputed)\n",
        "",
    ),
    bug(
        "who read what a failed plan was to compute goes on",
        "engine/scheduling/accounts.py",
        "if s.held.has_any(blocks)]",
        "if False]",
    ),
    bug(
        "who failed and was admitted anew is not suspected",
        "engine/scheduling/accounts.py",
        "if not sequence.done:  ",
        "if sequence.epoch == entry.epoch:  ",
    ),
    Bug(
        "a beam is extended before it is forked",
        (
            Edit(
                "engine/scheduling/accounts.py",
                "continued[choice.parent] = choice\n",
                "continued[choice.parent] = choice\n                choice.parent.tokens.append(choice.token)\n",
            ),
            Edit(
                "engine/scheduling/accounts.py",
                "            parent.tokens.append(choice.token)\n            parent.chosen",
                "            parent.chosen",
            ),
        ),
    ),
    bug(
        "the device is not told of a beam's token",
        "engine/scheduling/accounts.py",
        "            parent.chosen.append(choice.token)\n",
        "",
    ),
    bug(
        "the worst beams go on",
        "engine/scheduling/beam.py",
        "key=lambda c: (-c[0], c[1], c[2])",
        "key=lambda c: (c[0], c[1], c[2])",
    ),
    bug("the length penalty is ignored", "engine/scheduling/beam.py", " / len(one.tokens) ** penalty", ""),
]

DRAFT_TREE = [
    bug("an accepted path is not moved to its places", "engine/draft_tree.py", "if source != target]", "if False]"),
    bug(
        "an accepted path is moved from its end",
        "engine/draft_tree.py",
        "for target, source in enumerate(follow(draft, tokens[:-1])) if",
        "for target, source in [*enumerate(follow(draft, tokens[:-1]))][::-1] if",
    ),
    bug(
        "a guess in a tree sees another branch",
        "engine/draft_tree.py",
        "paths[one.parent] if one.parent >= 0 else ()",
        "paths[i - 1] if one.parent >= 0 else ()",
    ),
    bug(
        "a guess is kept without its parent",
        "engine/draft_tree.py",
        "key=lambda i: -chances[i])[:count]",
        "key=lambda i: -draft[i].chance)[:count]",
    ),
    bug(
        "a tree is planned while a plan of its sequence is open",
        "engine/scheduling/plan_builder.py",
        "return self.trees and not sequence.flights",
        "return self.trees",
    ),
    bug(
        "a tree is planned where the device verifies lines",
        "engine/scheduling/plan_builder.py",
        "return self.trees and not sequence.flights",
        "return not sequence.flights",
    ),
]

DRAFTS = [
    bug(
        "a place too few is taken for drafts",
        "engine/scheduling/plan_builder.py",
        "self.cache.grow(holding, sequence.certain, end, self.number)",
        "self.cache.grow(holding, sequence.certain, end - bool(sequence.draft), self.number)",
    ),
    bug(
        "a row whose drafts are verified is planned",
        "engine/scheduling/plan_builder.py",
        "bool(sequence.draft or sequence.verifies)",
        "bool(sequence.draft)",
    ),
    bug(
        "the fast path plans a row whose drafts are verified",
        "engine/scheduling/fast_path.py",
        "            and sequence.verifies\n",
        "            and False\n",
    ),
    bug(
        "a draft stays when a token comes without another",
        "engine/scheduling/fast_path.py",
        "            or sequence.draft\n            or not self._possible\n",
        "            or not self._possible\n",
    ),
    bug("a draft of before a preemption stays", "engine/sequence.py", "        self.draft.clear()\n", ""),
    bug(
        "a request gets more drafts than it takes",
        "engine/scheduling/plan_builder.py",
        "most = min(sequence.max_drafts, max(0, ",
        "most = min(99, max(0, ",
    ),
]

STORE = [
    bug(
        "a restored block is another tenant's",
        "cache/store.py",
        "repr((base.salt, adapters)).encode()",
        "repr(adapters).encode()",
    ),
    bug(
        "a block is loaded after the plan that reads it",
        "engine/scheduling/plan_builder.py",
        "            self.cache.loads.take(self.number),\n            saved,\n        )\n",
        "            getattr(self, '_late_loads', ()),\n            saved,\n        )\n"
        "        type(self)._late_loads = self.cache.loads.take(self.number)\n",
    ),
    bug("a block is saved before it is computed", "cache/store.py", "set(self.uncomputed.list_places())", "set()"),
    bug(
        "a lost block is taken for a hit",
        "engine/scheduling/accounts.py",
        "self.cache.uncomputed.find() if uncomputed is None else uncomputed\n        self",
        "[] if uncomputed is None else uncomputed\n        self",
    ),
    bug(
        "a block is reused while it is saved", "cache/store.py", "self.tree.pool.mark_busy(saved.blocks, plan)", "pass"
    ),
    bug(
        "a load that nobody needs any more is kept for a plan that takes its block",
        "engine/scheduling/waiting.py",
        "            self.cache.loads.cancel()\n",
        "",
    ),
    bug(
        "a window's block before the last ones is not restored",
        "cache/restore.py",
        "wanted |= {(i, g) for i in range(first, longest) if not held[g][i]}",
        "wanted |= {(i, g) for i in range(max(first, longest - 1), longest) if not held[g][i]}",
    ),
    bug(
        "a session is evicted like any other path",
        "cache/radix.py",
        "return KEPT if self.kept else self.priority",
        "return self.priority",
    ),
    bug(
        "a session's former path is kept for ever",
        "cache/sessions.py",
        "            node.kept -= 1\n",
        "            node.kept -= node is session.node\n",
    ),
    bug(
        "keys do not count in the names of blocks",
        "cache/store.py",
        "return _digest(digest, repr(key).encode())",
        "return _digest(digest, repr(len(key)).encode())",
    ),
]

# in the drafters themselves, which the tests in tests/draft must catch
DRAFTERS = [
    bug(
        "another tenant's answers are drafted",
        "draft/suffix.py",
        "return state.request.tenant, state.request.salt",
        'return "", state.request.salt',
    ),
    bug(
        "another salt's answers are drafted",
        "draft/suffix.py",
        "return state.request.tenant, state.request.salt",
        'return state.request.tenant, ""',
    ),
    bug(
        "a request that wants no drafts gets some",
        "draft/drafters.py",
        "if state.request.beam is not None or asked is False:",
        "if state.request.beam is not None:",
    ),
    bug(
        "drafts go past the answer's end",
        "draft/drafters.py",
        "state.request.max_tokens - state.num_generated - 1)",
        "state.request.max_tokens - state.num_generated + 3)",
    ),
    bug(
        "answers at rejected places are a place late",
        "draft/lookahead.py",
        "self._moved = answers[num_taken:]",
        "self._moved = answers[num_taken + 1 :]",
    ),
    bug("a function's ids are not checked", "draft/function.py", "or not 0 <= id < vocab_size", ""),
]
BUGS = [*POOL, *TREE, *BLOCKS, *ROSTER, *SCHEDULER, *ACCOUNTS, *DRAFT_TREE, *DRAFTS, *STORE]
