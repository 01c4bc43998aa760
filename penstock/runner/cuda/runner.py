"""A plan in, a ticket out: fill in, launch, and let the device work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import penstock.ops.triton  # noqa: F401  registers the bodies
from penstock import ops
from penstock.engine.plan import Output, Plan, Row, RowResult
from penstock.models.decoder import Decoder
from penstock.ops.inputs import ID, NUM_COMMON, POSITION, ROW
from penstock.ops.triton.attention import tile_tokens
from penstock.ops.triton.exact.attention import tile_tokens as exact_tile_tokens
from penstock.ops.triton.exact.product import ROWS
from penstock.runner.cuda.graphs import SingleSteps
from penstock.runner.cuda.packed import Packed, most_numbers
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.cuda.shared import Prefixes, fill
from penstock.runner.cuda.staging import Staging
from penstock.runner.cuda.ticket import Asked, Ticket
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import DeviceRow, Rows
from penstock.runner.sampling import prompt_logprobs
from penstock.runner.step import Step
from penstock.sampling.grammars import Grammars
from penstock.sampling.likeliest import UnusableLogits
from penstock.sampling.sampler import Sampler


class CudaRunner:
    def __init__(self, model: Decoder, memory: BlockMemory, grammars: Grammars | None, max_num_seqs: int,
                 max_num_batched_tokens: int, eager: bool = False, deterministic: bool = False) -> None:
        self.model, self.memory = model, memory
        self.max_num_batched_tokens, self.deterministic = max_num_batched_tokens, deterministic
        self.device = memory.blocks.device
        self.rows = Rows(len(memory.grouping.groups), grammars)
        self.sampler = Sampler()
        of_tile = exact_tile_tokens if deterministic else tile_tokens
        self._tile_tokens = min(of_tile(layer.attention.num_heads, shape[0]) for layer, shape in zip(
            model.spec.layers, model.spec.kv_shapes()) if shape)
        width = -(-model.spec.max_model_len // memory.block_size)
        with torch.inference_mode():
            self._caches = memory.layer_caches(model.spec.kv_shapes())
            self._tensors = RowTensors(max_num_seqs, self.rows.num_groups, width, self.device)
            room = most_numbers(max_num_batched_tokens, max_num_seqs, self.rows.num_groups)
            self._staging = Staging(room, self.device)
            self._singles = SingleSteps(model, self._caches, self._tensors, memory.block_size, max_num_seqs,
                                        self._tile_tokens, eager)
        self._prefixes = Prefixes(memory.block_size)
        self._last: Ticket | None = None
        self.timeline: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None  # of steps

    def warm(self) -> None:
        """Compile what the first steps take, several kernels at once."""
        most = self._singles.sizes[-1]
        sizes = set(self._singles.sizes[:2])      # one row and more take different kernels
        lengths = {2}
        if self.deterministic:                    # and here every so many rows
            sizes = {self._singles.size(min(size, most)) for size in (1, *ROWS[1:], most)}
            longest = self.max_num_batched_tokens
            lengths |= {longest, *(rows for rows in ROWS if most < rows < longest)}
        works: list[Callable[[], None]] = [*(partial(self._singles.warm, size) for size in sorted(sizes)),
                                           *(partial(self._warm_tile, length) for length in sorted(lengths))]
        with ThreadPoolExecutor(len(works), initializer=ops.take_exact, initargs=(self.deterministic,)) as threads:
            for done in [threads.submit(work) for work in works]:
                done.result()

    def _warm_tile(self, num_tokens: int) -> None:
        """A step of one tile, among tokens of nobody."""
        with torch.inference_mode():
            ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
            tables = [table[:1] for table in self._tensors.tables]
            step = Step(ids, ids, [torch.full_like(ids, -1) for _ in tables], tables,
                        torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
                        torch.full((1,), 2, dtype=torch.int32, device=self.device),
                        ops.Work(0, torch.zeros((1, 2), dtype=torch.int32, device=self.device)))
            self.model.forward(step, self._caches)

    def start(self, plan: Plan) -> Ticket:
        """Rows are taken in before anything can fail, so that later plans find them."""
        ticket = Ticket(plan.number, [RowResult() for _ in plan.rows], self._tensors, self.sampler)
        ops.take_exact(self.deterministic)
        try:
            with torch.inference_mode():
                if self._last is not None:
                    self._last.settle()
                self.rows.apply(plan)
                self._tensors.admit(plan.admissions)
                if plan.moves:
                    self.memory.move(plan.moves)
                begun = None if self.timeline is None else _now(timed=True)
                self._launch(plan, ticket)
                if begun is not None and self.timeline is not None:
                    self.timeline.append((begun, _now(timed=True)))
        except Exception as error:   # whatever a step raises must reach the scheduler, which finds the cause
            ticket.error = f"{type(error).__name__}: {error}"
        self._last = ticket
        return ticket

    def _launch(self, plan: Plan, ticket: Ticket) -> None:
        devices = [self.rows[row.row] for row in plan.rows]
        if all(_is_single(row) for row in plan.rows):
            self._run_singles(plan, devices, ticket)
        else:
            self._tensors.enter(plan)
            self._run_mixed(plan, devices, ticket)

    def _run_singles(self, plan: Plan, devices: list[DeviceRow], ticket: Ticket) -> None:
        count, singles = len(plan.rows), self._singles
        size = singles.size(count)
        may_share = self.rows.num_groups == 1 and not self.deterministic
        groups = self._prefixes.find(plan.rows, devices) if may_share else []
        flat = self._staging.take()[:singles.num_flat(size, bool(groups))]
        numbers, *sharing = singles.split(flat, size)
        if groups:
            fill(groups, self._tile_tokens, *sharing)
        numbers[:] = -1
        numbers[ROW, count:] = self._tensors.nobody
        numbers[[ROW, ID, POSITION], :count] = [
            [row.row for row in plan.rows],
            [tokens[row.start] if row.start < len(tokens := device.state.tokens) else -1
             for row, device in zip(plan.rows, devices)],
            [row.start for row in plan.rows]]
        several = False
        for s, row in enumerate(plan.rows):
            if any(row.blocks):
                for g, changes in enumerate(row.blocks):
                    if changes:
                        first = NUM_COMMON + 2 * g
                        numbers[first:first + 2, s] = changes[-1]
                        several |= len(changes) > 1
        if several:
            self._tensors.enter(plan)
        self._staging.send(len(flat), singles[size, bool(groups)].flat)
        one = singles.run(size, bool(groups))
        assert one.tokens is not None and one.logits is not None
        for s, (row, device, result) in enumerate(zip(plan.rows, devices, ticket.results)):
            self._expect(ticket, result, row, device, s)
        self._fetch(ticket, one.logits, one.tokens[:count])

    def _expect(self, ticket: Ticket, result: RowResult, row: Row, device: DeviceRow, place: int) -> None:
        """Say who chooses the row's token."""
        if device.state.on_device and not row.draft:
            ticket.chosen.append((result, device, place))
        else:
            ticket.asked.append(Asked(row, result, device, place))

    def _fetch(self, ticket: Ticket, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        if ticket.asked:
            ticket.logits = logits
        if ticket.chosen:
            ticket.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            ticket.tokens.copy_(tokens, non_blocking=True)
            ticket.done = _now()

    def _run_mixed(self, plan: Plan, devices: list[DeviceRow], ticket: Ticket) -> None:
        """Single tokens first; others after them."""
        model = self.model
        order = sorted(range(len(plan.rows)), key=lambda index: plan.rows[index].count != 1)
        rows, of = [plan.rows[index] for index in order], [devices[index] for index in order]
        results = [ticket.results[index] for index in order]
        packed = Packed(rows, of, self._tile_tokens)
        step, at, row_of = packed.send(self._staging, self._tensors, self.memory.block_size,
                                     self._singles.num_parts(packed.num_single))
        hidden = model.forward(step, self._caches)
        for row, device, result, end in zip(rows, of, results, packed.ends):
            if row.prompt_logprobs:
                self._prompt_logprobs(row, device, hidden[end - row.count:end], result)
        if not packed.at:
            ticket.done = _now()
            return
        logits = model.logits(hidden, at)
        place = 0
        for row, device, result in zip(rows, of, results):
            if row.output is Output.SAMPLE:
                self._expect(ticket, result, row, device, place)
                place += 1 + len(row.draft)
        tokens = ops.sample(logits, self._tensors.temperature, self._tensors.keys, (step.positions[at] + 1).int(),
                            row_of, self._tensors.last)       # of the types that a step of single tokens has
        self._fetch(ticket, logits, tokens)

    def _prompt_logprobs(self, row: Row, device: DeviceRow, hidden: torch.Tensor, result: RowResult) -> None:
        try:
            prompt_logprobs(self.model, self.sampler, row, device.state, hidden, result)
        except UnusableLogits as error:
            result.error = str(error)


def _now(timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_single(row: Row) -> bool:
    return row.count == 1 and row.output is Output.SAMPLE and not row.prompt_logprobs
