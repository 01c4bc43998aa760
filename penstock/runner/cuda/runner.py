"""A plan in, a ticket out: fill in, launch, and let the device work."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

import penstock.ops.triton  # noqa: F401  registers the bodies
from penstock import ops
from penstock.engine.plan import Output, Plan, Row, RowResult
from penstock.models.decoder import Decoder
from penstock.ops.inputs import ID, NUM_COMMON, POSITION, ROW
from penstock.ops.triton.keys import settle_keys
from penstock.ops.triton.launch_memory import remember_launches
from penstock.ops.triton.launchers import load_apart
from penstock.runner.cuda.graphs import EXTRA, PLAIN, WISHING, Chosen, single_steps
from penstock.runner.cuda.lineup import Lineup, ordered
from penstock.runner.cuda.moment import now
from penstock.runner.cuda.packed import Packed, most_numbers
from penstock.runner.cuda.shared import Prefixes, fill
from penstock.runner.cuda.staging import Staging
from penstock.runner.cuda.ticket import Asked, Ticket
from penstock.runner.cuda.warm import first_steps
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import DeviceRow, Rows
from penstock.runner.sampling import prompt_logprobs
from penstock.runner.step import ends_of
from penstock.sampling.arrays import UnusableLogits
from penstock.sampling.grammars import Grammars
from penstock.sampling.sampler import Sampler


class CudaRunner:
    def __init__(
        self,
        model: Decoder,
        memory: BlockMemory,
        grammars: Grammars | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eager: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.model, self.memory = model, memory
        self.deterministic = deterministic
        self._least = WISHING if deterministic else PLAIN
        self.device = memory.blocks.device
        self.rows = Rows(len(memory.grouping.groups), grammars)
        self.sampler = Sampler()
        num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        with torch.inference_mode():
            room = most_numbers(max_num_batched_tokens, max_num_seqs, self.rows.num_groups)
            self._staging = Staging(room, self.device)
            self._singles = single_steps(model, memory, max_num_seqs, num_processors, eager, deterministic)
        self._caches, self._tensors = self._singles.caches, self._singles.rows
        self._prefixes = Prefixes(memory.block_size)
        self._line: Lineup | None = None  # of the last step of single tokens
        self._last: Ticket | None = None

    def warm(self) -> None:
        """Compile what the first steps take, several kernels at once."""
        settle_keys()
        remember_launches()
        load_apart()
        works = first_steps(self._singles)
        with ThreadPoolExecutor(len(works)) as threads:
            for done in [threads.submit(work) for work in works]:
                done.result()

    def close(self) -> None:
        """Recorded steps refer to what refers to them, and the collector does not look at what was there when the
        engine was ready: without this they would hold weights and cache for ever."""
        self._singles.forget()

    def start(self, plan: Plan) -> Ticket:
        """Rows are taken in before anything can fail, so that later plans find them."""
        ticket = Ticket(plan.number, self._tensors, self.sampler)
        ops.take_exact(self.deterministic)
        try:
            with torch.inference_mode():
                if self._last is not None:
                    self._last.settle()
                self.rows.apply(plan)
                self._tensors.admit(plan.admissions, [self.rows[one.row].state for one in plan.admissions])
                if plan.moves:
                    self.memory.move(plan.moves)
                self._launch(plan, ticket)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            ticket.error = f"{type(error).__name__}: {error}"
            self._keep_apart(plan)
        self._last = ticket
        return ticket

    def _keep_apart(self, plan: Plan) -> None:
        """The plan failed, and the next one is made already: it writes for the same rows, into blocks of theirs."""
        with suppress(Exception), torch.inference_mode():  # a device that takes no more work writes nothing either
            self._tensors.enter(plan)

    def _launch(self, plan: Plan, ticket: Ticket) -> None:
        devices = self.rows.of(plan)
        if all(_is_single(row) for row in plan.rows):
            self._run_singles(plan, devices, ticket)
        else:
            self._tensors.enter(plan)
            self._run_mixed(plan, devices, ticket)

    def _run_singles(self, plan: Plan, devices: list[DeviceRow], ticket: Ticket) -> None:
        rows, starts = np.array([[row.row for row in plan.rows], [row.start for row in plan.rows]])
        line, num_admitted = self._line, self.rows.num_admitted
        goes_on = line is not None and line.goes_on(rows, starts, num_admitted)
        if line is None or not goes_on:
            line = self._line = Lineup(rows, devices, starts, self._tensors.nobody, num_admitted)
            if self.rows.num_groups == 1 and not self.deterministic:
                line.groups = self._prefixes.find(line.starts.tolist(), line.devices)
        places = line.places(rows)
        count, groups, singles = len(devices), line.groups, self._singles
        key = singles.fitting(count, bool(groups), int(line.starts[0]) + 1)
        size = key[0]
        flat = self._staging.take()[: singles.num_flat(size, bool(groups))]
        numbers, *sharing = singles.split(flat, size)
        if groups:
            fill(groups, singles.tile_tokens, *sharing)
        numbers[:] = -1
        numbers[ROW, :count], numbers[ROW, count:] = line.numbers, self._tensors.nobody
        numbers[POSITION, :count] = line.starts
        if not (goes_on and line.simple):
            numbers[ID, :count] = line.tokens()
        if _enter_blocks(plan.rows, places, numbers):
            self._tensors.enter(plan)
        one = singles[key]
        self._staging.send(len(flat), one.flat)
        logits = singles.run(one.forward)
        wishing = self._least  # another's wishes are no reason to choose a row's token by other kernels
        if line.simple:
            ticket.line, ticket.places = line, places
        else:
            ticket.results = results = [RowResult() for _ in plan.rows]
            wishing = max(
                wishing,
                self._expect(
                    ticket, list(zip(ordered(plan.rows, places), line.devices, ordered(results, places), range(count)))
                ),
            )
        self._fetch(ticket, logits, singles.run(one.choice[wishing]), count)

    def _expect(self, ticket: Ticket, rows: Sequence[tuple[Row, DeviceRow, RowResult, int]]) -> int:
        """Say who chooses each row's token, given with its place among the logits; the most that any of those that the
        device chooses asks for. Where it matters which tokens came before, they are awaited, while the
        device is busy with this step's logits."""
        others = []
        for row, device, result, place in rows:
            if device.state.simple and not row.draft:
                ticket.chosen.append((result, device, place))
            else:
                others.append((row, device, result, place))
        if not others:
            return PLAIN
        if self._last is not None and any(
            _is_late(row, device) and device.state.on_device for row, device, _, _ in others
        ):
            self._last.arrive()
        wishes, wishing = self._tensors.wishes, PLAIN
        for row, device, result, place in others:
            state, length = device.state, row.start + row.count
            if (
                state.on_device
                and not row.draft
                and state.free
                and (len(state.tokens) == length or not _is_late(row, device))
                and wishes.allow(row.row, state, length - state.num_prompt)
            ):
                ticket.chosen.append((result, device, place))
                wishing = max(wishing, EXTRA if state.asks_extras else WISHING)
            else:
                ticket.asked.append(Asked(row, result, device, place))
                wishes.leave(row.row, state)
        wishes.send()
        return wishing

    def _fetch(self, ticket: Ticket, logits: torch.Tensor, chosen: Chosen, count: int) -> None:
        if ticket.asked:
            ticket.logits = logits
        if ticket.chosen or ticket.line is not None:
            ticket.tokens = _coming(chosen.tokens[:count])
            if chosen.report is not None and any(one.state.num_logprobs is not None for _, one, _ in ticket.chosen):
                ticket.report = _coming(chosen.report[:count])
            if chosen.mus is not None and any(one.state.samplers.mu is not None for _, one, _ in ticket.chosen):
                ticket.mus = _coming(chosen.mus[:count])
            ticket.done = now()

    def _run_mixed(self, plan: Plan, devices: list[DeviceRow], ticket: Ticket) -> None:
        """Single tokens first; others after them."""
        model, singles = self.model, self._singles
        order = sorted(range(len(plan.rows)), key=lambda index: plan.rows[index].count != 1)
        rows, of = [plan.rows[index] for index in order], [devices[index] for index in order]
        ticket.results = every = [RowResult() for _ in plan.rows]
        results = [every[index] for index in order]
        packed = Packed(rows, of, singles.tile_tokens)
        longest = max(row.start + row.count for row in rows)
        step, at, owners, row_of = packed.send(
            self._staging, self._tensors, self.memory.block_size, singles.num_parts(packed.num_single, longest)
        )
        if any(row.prompt_logprobs for row in rows):
            states = model.forward(step, self._caches)
            for row, device, result, end in zip(rows, of, results, packed.ends):
                if row.prompt_logprobs:
                    self._prompt_logprobs(row, device, states[end - row.count : end], result)
            hidden, lengths = states[at], (step.positions[at] + 1).int()
        else:
            ends = ends_of(step, at, owners, singles.num_parts(len(packed.at), longest))
            hidden, lengths = model.forward(step, self._caches, ends), ends.step.lengths
        if not packed.at:
            ticket.done = now()
            return
        logits = model.logits(hidden)
        place, expected = 0, []
        for row, device, result in zip(rows, of, results):
            if row.output is Output.SAMPLE:
                expected.append((row, device, result, place))
                place += 1 + len(row.draft)
        wishing = max(self._expect(ticket, expected), self._least)
        self._fetch(ticket, logits, singles.choose(logits, lengths, row_of, wishing), place)

    def _prompt_logprobs(self, row: Row, device: DeviceRow, hidden: torch.Tensor, result: RowResult) -> None:
        try:
            prompt_logprobs(self.model, self.sampler, row, device.state, hidden, result)
        except UnusableLogits as error:
            result.error = str(error)


def _coming(values: torch.Tensor) -> torch.Tensor:
    """On their way to the host."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def _is_late(row: Row, device: DeviceRow) -> bool:
    """True if a row's mask depends on tokens that may not have come back."""
    return device.state.late_at(row.start + row.count - device.state.num_prompt)


def _is_single(row: Row) -> bool:
    return row.count == 1 and row.output is Output.SAMPLE and not row.prompt_logprobs and not row.draft


def _enter_blocks(rows: Sequence[Row], places: Sequence[int], numbers: np.ndarray) -> bool:
    """One new block of each row and group, into the numbers at its place; whether there are more."""
    several = False
    for row, place in zip(rows, places):
        if row.blocks:
            for g, changes in enumerate(row.blocks):
                if changes:
                    first = NUM_COMMON + 2 * g
                    numbers[first : first + 2, place] = next(reversed(changes.items()))
                    several |= len(changes) > 1
    return several
