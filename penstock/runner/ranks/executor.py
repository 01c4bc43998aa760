"""The executor of several ranks: each plan goes to all of them, and rank 0, here, chooses the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace

from penstock.engine.executor import Answer, Awaited, Describe, Done, DropLora, LoadLora
from penstock.engine.plan import Plan, Result, Row, RowResult
from penstock.engine.ranks import RankRecord
from penstock.errors import RankLost
from penstock.layers import Received
from penstock.parallel import Mesh
from penstock.runner.cpu.runner import Runner
from penstock.runner.ranks.flow import HiddenReceiver
from penstock.runner.ranks.group import HEARTBEAT_S, LOSS_S, RankGroup
from penstock.runner.ranks.keeping import SharedStore, without_copies
from penstock.runner.ranks.messages import Compute, ControlMessage, strip


class UnsentTokens:
    """Chosen tokens that the other ranks have not been told of; they come with a row's next plan."""

    def __init__(self, keeps_prompts: bool) -> None:
        self._keeps_prompts = keeps_prompts
        self._admitted: dict[int, int] = {}  # the plan with the row's last admission
        self._unsent: dict[int, tuple[int, ...]] = {}

    def note(self, plan: Plan, result: Result) -> None:
        """Take the tokens of a plan that has ended, but not those of rows that were given away meanwhile."""
        for row, one in zip(plan.rows, result.rows):
            tokens = one.tokens if isinstance(one, RowResult) else (one,)
            if tokens and self._admitted.get(row.row, -1) <= plan.number:
                self._unsent[row.row] = self._unsent.get(row.row, ()) + tokens

    def complete(self, plan: Plan) -> Plan:
        """Return the plan as the other ranks need it."""
        for admission in plan.admissions:
            self._admitted[admission.row] = plan.number
            self._unsent.pop(admission.row, None)
        return replace(
            plan,
            rows=tuple(self._add(row) for row in plan.rows),
            admissions=tuple(strip(one, self._keeps_prompts) for one in plan.admissions),
            min_chance=None,
            ahead=0,
        )

    def _add(self, row: Row) -> Row:
        unsent = self._unsent.pop(row.row, ())
        return replace(row, tokens=unsent + row.tokens) if unsent else row


class StartedPlan:
    """The ticket of a plan: rank 0's part is computed when somebody waits for it."""

    def __init__(self, executor: RankExecutor, plan: Plan, is_lost: bool) -> None:
        self._executor, self.plan, self.is_lost = executor, plan, is_lost
        self.outcome: Result | None = None

    def result(self) -> Result:
        if self.outcome is None:
            self._executor.compute_until(self)
        assert self.outcome is not None
        return self.outcome


class ControlTicket:
    """The ticket of a control message to all ranks."""

    def __init__(self, executor: RankExecutor, number: int, own: Awaited[Answer], message: LoadLora | DropLora) -> None:
        self._executor, self._number, self._own, self._message = executor, number, own, message
        self._answer: Answer | None = None

    @property
    def is_done(self) -> bool:
        return self._answer is not None or self._own.is_done and self._collect() is not None

    def _collect(self) -> Answer | None:
        """Join the answers, once all are there. An adapter that one rank cannot read is dropped by all."""
        answers = self._executor.group.take_answers(self._number)
        if answers is None:
            return None
        self._answer = own = self._own.result()
        failed = next(((rank, one.error) for rank, one in sorted(answers.items()) if one.error is not None), None)
        if own.error is None and failed is not None:
            self._answer = Answer(error=f"rank {failed[0]}: {failed[1]}")
        if self._answer.error is not None and isinstance(self._message, LoadLora):
            self._executor.control(DropLora(self._message.number))
        return self._answer

    def result(self) -> Answer:
        self._own.result()
        while self._answer is None and self._collect() is None:
            self._executor.group.wait(HEARTBEAT_S)
        assert self._answer is not None
        return self._answer


class RankExecutor:
    verifies_trees = False  # accepted paths are moved in the cache, and other ranks do not know them in time

    def __init__(
        self,
        runner: Runner,
        group: RankGroup,
        receiver: HiddenReceiver | None,
        mesh: Mesh,
        facts: Sequence[RankRecord] = (),
        store: SharedStore | None = None,
    ) -> None:
        self.runner, self.group, self._mesh, self._store = runner, group, mesh, store
        self.facts = list(facts)
        self._receiver = receiver
        self._tokens = UnsentTokens(group.layout.num_shards > 1)
        self._started: deque[StartedPlan] = deque()  # whose part here is not computed
        self._num_messages = 0
        if store is not None:
            store.sender = self

    def start(self, plan: Plan) -> StartedPlan:
        is_lost = False
        if self._store is not None and plan.loads:
            is_lost = not self._store.restore(plan)
            plan = without_copies(plan)
        self.group.broadcast(Compute(self._tokens.complete(plan), is_lost))
        self._started.append(ticket := StartedPlan(self, plan, is_lost))
        return ticket

    def number(self) -> int:
        if self._started:
            self.compute_until(self._started[-1])
        self._num_messages += 1
        return self._num_messages

    def compute_until(self, last: StartedPlan) -> None:
        """Compute what was started, in order, up to that plan."""
        while last.outcome is None:
            ticket = self._started.popleft()
            if ticket.is_lost:
                self.runner.apply(ticket.plan)
                ticket.outcome = Result(ticket.plan.number, lost=True)
            else:
                ticket.outcome = self._compute(ticket.plan)

    def _compute(self, plan: Plan) -> Result:
        self.group.check()
        try:
            if self._receiver is not None and plan.rows:
                first: Received = self.runner.model.embedding  # type: ignore[assignment]
                first.take(self._receiver.receive(plan.number))
            result = self.runner.run(plan)
        except RankLost as error:
            self.group.await_loss(LOSS_S)
            self.group.lose(error.rank, str(error))
            self.group.check()
            raise
        if result.error is not None and self.group.layout.num_shards > 1:
            self.group.fail(RankLost(f"rank 0 failed in a step that others are in: {result.error}", 0))
        self.group.check()
        self._tokens.note(plan, result)
        return result

    def control(self, message: object) -> Awaited[Answer]:
        number = self.number()
        own = self.runner.control(message)
        if isinstance(message, Describe):
            told = own.result()
            return Done(replace(told, values={**told.values, "num_ranks": self.group.layout.num_ranks}))
        if not isinstance(message, LoadLora | DropLora) or self.runner.loras is None:
            return own
        self.group.broadcast(ControlMessage(number, type(message).__name__, asdict(message)))
        return ControlTicket(self, number, own, message)

    def close(self) -> None:
        self.group.close()
        if self._receiver is not None:
            self._receiver.close()
        self._mesh.close()
        self.runner.close()
