"""The executor of one GPU: pack a plan, launch it, and hand out a ticket."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import numpy as np
import torch

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.draft.drafters import Drafters
from penstock.engine.executor import Answer, Awaited, Describe, Done, DropLora, LoadLora, Values, obey
from penstock.engine.plan import Output, Plan, Row, RowResult
from penstock.models.decoder import Decoder
from penstock.ops.attention.inputs import ID, POSITION, ROW
from penstock.runner.compile.cache_keys import fix_cache_keys
from penstock.runner.compile.launch_cache import cache_launches
from penstock.runner.compile.launchers import isolate_launchers
from penstock.runner.compile.warm import first_steps
from penstock.runner.cuda.decode_batch import DecodeBatch, PrefixFinder, enter_blocks, fill_shared, put_in_order
from penstock.runner.cuda.decode_graphs import DecodeGraphs, SampledTokens, make_decode_graphs
from penstock.runner.cuda.drafting.features import DeviceDrafter, KeptStep
from penstock.runner.cuda.mixed_graphs import MixedGraphs
from penstock.runner.cuda.packed import PackedRows, is_single, max_numbers, require_lines
from penstock.runner.cuda.preparation import Preparation
from penstock.runner.cuda.staging import Staging, free_gpu_memory, record_event
from penstock.runner.cuda.ticket import DraftRow, HostRow, Proposals, StepTicket
from penstock.runner.loras import LoraBank
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import RunningRow, RunningRows, add_prompt_logprobs
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.transfer import transfer
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.logits import UnusableLogits
from penstock.sampling.row import Chooser
from penstock.sampling.sampler import Sampler

MAX_IDLE_S = 0.02  # after which a device is idle for want of requests
_log = logging.getLogger(__name__)


class CudaRunner:
    store: BlockStore | None = None
    loras: LoraBank | None = None
    drafter: DeviceDrafter | None = None
    verifies_trees = False  # where tensor cores add in the order of places, a path's sums differ from a line's

    def __init__(
        self,
        model: Decoder,
        memory: BlockMemory,
        grammars: GrammarCompiler | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eager: bool = False,
        deterministic: bool = False,
        drafters: Drafters | None = None,
    ) -> None:
        self.model, self.memory = model, memory
        self.deterministic = deterministic
        # Deterministic: always the full sampler, so that a neighbour cannot switch kernels.
        self._min_chooser = Chooser.DEVICE_FILTERED if deterministic else Chooser.DEVICE
        self.device = memory.blocks.device
        self.rows = RunningRows(len(memory.grouping.groups), grammars, drafters)
        self.sampler = Sampler()
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        with torch.inference_mode():
            room = max_numbers(max_num_batched_tokens, max_num_seqs, self.rows.num_groups)
            self._staging = Staging(room, self.device)
            self._graphs = make_decode_graphs(model, memory, max_num_seqs, num_sms, eager, deterministic)
            self._mixed = MixedGraphs(self._graphs, max_num_seqs, max_num_batched_tokens)
        self._preparation = Preparation(self._graphs, self._mixed, self._min_chooser)
        self.decode_steps: DecodeGraphs = self._graphs
        self._tensors = self._graphs.rows
        self._prefixes = PrefixFinder(memory.block_size)
        self._batch: DecodeBatch | None = None  # of the last decode step
        self._last: StepTicket | None = None
        self._verifying: list[StepTicket] = []  # plans that verify drafts, in the order they were started

    def warm(self) -> None:
        """Compile the first steps' kernels, several at once."""
        fix_cache_keys()
        cache_launches()
        isolate_launchers()
        works = first_steps(self._graphs)
        with ThreadPoolExecutor(len(works)) as threads:
            for done in [threads.submit(work) for work in works]:
                done.result()

    def prepare(self, is_compiled: Event | None = None) -> bool:
        """Capture a step that may come later; the engine is idle. False if nothing is left. Captures begin once the
        kernels are compiled."""
        self._graphs.pool.has_idle_moments = True
        if is_compiled is not None and not is_compiled.is_set():
            return True
        try:
            with torch.inference_mode():
                return self._preparation.step() or self.drafter is not None and self.drafter.prepare()
        except Exception as error:  # steps that are not captured are launched kernel by kernel
            self._graphs.pool.can_capture = False
            _log.warning("no more steps are captured: %s: %s", type(error).__name__, error)
            return False

    def install(self, drafter: DeviceDrafter) -> None:
        """Draft with a model from now on."""
        self.drafter, self._graphs.features = drafter, drafter.features
        with torch.inference_mode():
            drafter.warm()

    def close(self) -> None:
        """Give up weights, cache and graphs, whoever still holds the runner: captured steps are cycles, and the
        collector skips what was there when the engine was ready."""
        if vars(self):
            if self.store is not None:
                self.store.close()
            if self.loras is not None:
                self.loras.close()
            self._graphs.forget()
            self._mixed.forget()
            if self.drafter is not None:
                self.drafter.forget()
        vars(self).clear()
        free_gpu_memory()

    def control(self, message: object) -> Awaited[Answer]:
        cache_bytes = self.memory.blocks.nbytes
        told: Values = {"device": str(self.device), "num_plans": self.rows.num_plans, "cache_bytes": cache_bytes}
        if self.loras is not None and isinstance(message, LoadLora):
            return self.loras.load(message)
        if self.loras is not None and isinstance(message, DropLora):
            return self.loras.drop(message)
        return Done(obey(message, {Describe: lambda _: told}))

    def start(self, plan: Plan) -> StepTicket:
        """Start a plan. Rows are applied before anything can fail, so that later plans find them."""
        ticket = StepTicket(plan.number, self._tensors, self.sampler)
        try:
            with torch.inference_mode():
                if self._last is not None:
                    self._last.settle()
                ticket.begun, ticket.idle_s = self._record_begin()
                self.rows.apply(plan)
                self._tensors.admit(plan.admissions, [self.rows[one.row].state for one in plan.admissions])
                if self.loras is not None:
                    for one in plan.admissions:
                        self.loras.enter(one.adapter, one.request.loras)
                ticket.lost = bool(transfer(plan, self.memory, self.store))
                if plan.rows and not ticket.lost:
                    self._step(plan, ticket)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            ticket.error = f"{type(error).__name__}: {error}"
        if ticket.lost or ticket.error is not None:
            self._enter_blocks_of_failed(plan)
        self._last = ticket
        return ticket

    def _step(self, plan: Plan, ticket: StepTicket) -> None:
        if plan.moves:
            self.memory.move(plan.moves)
        if self._verifying:
            self._require_exact_starts(plan)
        self._launch(plan, ticket)
        ticket.done = record_event()

    def _enter_blocks_of_failed(self, plan: Plan) -> None:
        """Write a failed plan's blocks to the tables: the plan after it is made already and writes into them."""
        with suppress(Exception), torch.inference_mode():  # a device that takes no more work writes nothing either
            self._tensors.enter(plan)

    def _record_begin(self) -> tuple[torch.cuda.Event, float]:
        """The event after which a step begins: the end of the step that the device is busy with, or a new one. Then
        the seconds that the device has waited since the result of the last step."""
        last = self._last
        if last is None or last.done is None:
            return record_event(), 0.0
        if not last.done.query():  # type: ignore[no-untyped-call]
            return last.done, 0.0
        idle_s = time.perf_counter() - last.end_s if last.ended else 0.0
        return record_event(), idle_s if idle_s < MAX_IDLE_S else 0.0

    def _require_exact_starts(self, plan: Plan) -> None:
        """Refuse a row while an earlier plan verifies its drafts: `start` is an upper bound until that plan ends."""
        self._verifying = [earlier for earlier in self._verifying if not earlier.ended]
        admitted = {admission.row for admission in plan.admissions}
        for row in plan.rows:
            for earlier in self._verifying:
                if row.row in earlier.verifying and row.row not in admitted:
                    raise RuntimeError(
                        f"row {row.row} of plan {plan.number} cannot be placed before plan {earlier.number}, which "
                        "verifies a draft of it, has ended: wait for that plan's result"
                    )

    def _launch(self, plan: Plan, ticket: StepTicket) -> None:
        devices = self.rows.of(plan)
        drafters = self.rows.drafters
        if self.drafter is not None:
            self.drafter.follow(plan, devices)
        if drafters is not None and plan.min_chance is not None and plan.min_chance < 1:
            ticket.proposals = Proposals(devices, drafters.max_tokens, plan.min_chance, self.deterministic)
        if all(is_single(row) for row in plan.rows):
            self._run_decode(plan, devices, ticket)
        else:
            ticket.verifying = frozenset(row.row for row in plan.rows if row.draft)
            if ticket.verifying:
                require_lines(plan)
                self._verifying.append(ticket)
            self._tensors.enter(plan)
            self._run_mixed(plan, devices, ticket)

    def _run_decode(self, plan: Plan, devices: list[RunningRow], ticket: StepTicket) -> None:
        rows, starts = np.array([[row.row for row in plan.rows], [row.start for row in plan.rows]])
        batch, num_admitted = self._batch, self.rows.num_admitted
        is_next = batch is not None and batch.advance(rows, starts, num_admitted)
        if batch is None or not is_next:
            batch = self._batch = DecodeBatch(rows, devices, starts, self._tensors.padding_row, num_admitted)
            if self._tensors.only_full and not self.deterministic:
                batch.prefixes = self._prefixes.find(batch.starts.tolist(), batch.devices)
        places = batch.places(rows)
        count, prefixes, graphs = len(devices), batch.prefixes, self._graphs
        key = graphs.pick(count, bool(prefixes), int(batch.starts[0]) + 1)
        size = key[0]
        prefixes = prefixes if key[1] else []
        flat = self._staging.take()[: graphs.num_flat(size, key[1])]
        numbers, *sharing = graphs.split(flat, size)
        if prefixes:
            fill_shared(prefixes, graphs.tile_tokens, *sharing)
        numbers[:] = -1
        numbers[ROW, :count], numbers[ROW, count:] = batch.numbers, self._tensors.padding_row
        numbers[POSITION, :count] = batch.starts
        is_steady = batch.is_steady and (batch.is_simple or self._tensors.params.is_counted)
        if not (is_next and is_steady):
            numbers[ID, :count] = batch.tokens()
        if enter_blocks(plan.rows, places, numbers):
            self._tensors.enter(plan)
        one = graphs[key]
        self._staging.send(len(flat), one.flat)
        logits = graphs.pool.run(one.forward)
        self._keep(ticket, plan, devices, places, count)
        chooser = self._min_chooser
        if is_steady:
            ticket.batch, ticket.places = batch, places
            chooser = chooser if batch.is_simple else max(chooser, Chooser.DEVICE_FILTERED)
        else:
            ticket.results = results = [RowResult() for _ in plan.rows]
            in_order, results_in_order = put_in_order(plan.rows, places), put_in_order(results, places)
            expected = list(zip(in_order, batch.devices, results_in_order, range(count)))
            chooser = max(chooser, self._assign(ticket, expected))
        self._fetch(ticket, logits, graphs.pool.run(one.sample[chooser]), count)

    def _assign(self, ticket: StepTicket, rows: Sequence[tuple[Row, RunningRow, RowResult, int]]) -> Chooser:
        """Assign each row, given with its place among the logits, to the device or the host; returns the
        largest chooser of the device's. A mask that depends on earlier tokens waits for them."""
        others, chooser, is_counted = [], Chooser.DEVICE, self._tensors.params.is_counted
        for row, device, result, place in rows:
            if row.draft and device.state.can_verify_on_device:
                ticket.draft_rows.append(DraftRow(row, result, device, place))
                chooser = max(chooser, device.state.chooser)
            elif device.state.is_steady and not row.draft and (is_counted or device.state.chooser <= Chooser.DEVICE):
                ticket.device_rows.append((result, device, place))
                chooser = max(chooser, device.state.chooser)
            else:
                others.append((row, device, result, place))
        if not others:
            return chooser
        if self._last is not None and any(
            _is_late(row, device) and device.state.chooser is not Chooser.HOST for row, device, _, _ in others
        ):
            self._last.arrive()
        params = self._tensors.params
        params.compute_masks(
            [
                (row.row, device.state, row.start + row.count - device.state.num_prompt)
                for row, device, _, _ in others
                if not row.draft
                and device.state.next_chooser is not Chooser.HOST
                and len(device.state.tokens) == row.start + row.count
                and _is_late(row, device)
            ]
        )
        for row, device, result, place in others:
            state, length = device.state, row.start + row.count
            if (
                state.next_chooser is not Chooser.HOST
                and not row.draft
                and (len(state.tokens) == length or not _is_late(row, device))
                and params.allow(row.row, state, length - state.num_prompt)
            ):
                ticket.device_rows.append((result, device, place))
                chooser = max(chooser, Chooser.DEVICE_FILTERED, state.chooser)
            else:
                ticket.host_rows.append(HostRow(row, result, device, place))
                params.skip(row.row, state)
        params.send()
        return chooser

    def _fetch(self, ticket: StepTicket, logits: torch.Tensor, sampled: SampledTokens, count: int) -> None:
        if ticket.host_rows:
            ticket.logits = logits
        if ticket.device_rows or ticket.draft_rows or ticket.batch is not None:
            ticket.tokens = _to_host(sampled.tokens[:count])
            if ticket.batch is not None:
                most = ticket.batch.max_logprobs
            else:
                asked = [one.state.num_logprobs for _, one, _ in ticket.device_rows]
                asked += [one.device.state.num_logprobs for one in ticket.draft_rows]
                most = max((number for number in asked if number is not None), default=None)
            if sampled.report is not None and most is not None:
                ticket.report, ticket.max_logprobs = _to_host(sampled.report[:count]), most
            if sampled.mus is not None and any(one.state.samplers.mu is not None for _, one, _ in ticket.device_rows):
                ticket.mus = _to_host(sampled.mus[:count])

    def _run_mixed(self, plan: Plan, devices: list[RunningRow], ticket: StepTicket) -> None:
        """Run a plan of any rows: those of one token first."""
        model, graphs = self.model, self._graphs
        order = sorted(range(len(plan.rows)), key=lambda index: plan.rows[index].count != 1)
        rows, of = [plan.rows[index] for index in order], [devices[index] for index in order]
        ticket.results = every = [RowResult() for _ in plan.rows]
        results = [every[index] for index in order]
        packed = PackedRows(rows, of, graphs.tile_tokens)
        wants_prompt = any(row.prompt_logprobs for row in rows)
        key = None if wants_prompt else self._mixed.pick(packed.num_tokens, max(len(rows), len(packed.at)))
        if key is not None:
            one = self._mixed.send(self._staging, packed, key)
            logits = graphs.pool.run(one.forward)
            self._keep_packed(ticket, plan, devices, packed, order)
            if not packed.at:
                return
            chooser, count = self._assign_outputs(ticket, rows, of, results)
            self._fetch(ticket, logits, graphs.pool.run(one.sample[chooser]), count)
            return
        inputs = self._mixed.send_alone(self._staging, packed)
        if wants_prompt:
            states = graphs.compute(inputs.step)
            for row, device, result, end in zip(rows, of, results, packed.ends):
                if row.prompt_logprobs:
                    self._prompt_logprobs(row, device, states[end - row.count : end], result)
            hidden, lengths = states[inputs.at], (inputs.step.places[inputs.at] + 1).int()
        else:
            lengths = inputs.add_ends(graphs.num_kv_splits(len(packed.at), packed.longest))
            hidden = graphs.compute(inputs.step)
        self._keep_packed(ticket, plan, devices, packed, order)
        if not packed.at:
            return
        logits = model.logits(hidden, adapters=inputs.end_adapters)
        chooser, count = self._assign_outputs(ticket, rows, of, results)
        self._fetch(ticket, logits, graphs.sample(logits, lengths, inputs.rows, chooser), count)

    def _keep(
        self, ticket: StepTicket, plan: Plan, devices: list[RunningRow], firsts: Sequence[int], count: int
    ) -> None:
        """Keep what a drafting model reads of the step."""
        if self.drafter is not None:
            features = self.drafter.features
            taken = [] if features is None else features.take(count)
            ticket.kept = KeptStep(self.drafter, plan, devices, firsts, taken, self.rows.num_plans)

    def _keep_packed(
        self, ticket: StepTicket, plan: Plan, devices: list[RunningRow], packed: PackedRows, order: Sequence[int]
    ) -> None:
        features = None if self.drafter is None else self.drafter.features
        firsts = packed.find_firsts(order, features is not None and features.of_outputs)
        self._keep(ticket, plan, devices, firsts, packed.num_tokens)

    def _assign_outputs(
        self, ticket: StepTicket, rows: Sequence[Row], devices: Sequence[RunningRow], results: Sequence[RowResult]
    ) -> tuple[Chooser, int]:
        """Assign the rows of a mixed step; returns who samples on the device, and the number of outputs."""
        place, expected = 0, []
        for row, device, result in zip(rows, devices, results):
            if row.output is Output.SAMPLE:
                expected.append((row, device, result, place))
                place += 1 + len(row.draft)
        return max(self._assign(ticket, expected), self._min_chooser), place

    def _prompt_logprobs(self, row: Row, device: RunningRow, hidden: torch.Tensor, result: RowResult) -> None:
        try:
            add_prompt_logprobs(self.model, self.sampler, row, device, hidden, result)
        except UnusableLogits as error:
            result.error = str(error)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Start copying values to pinned memory on the host."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def _is_late(row: Row, device: RunningRow) -> bool:
    """True if a row's mask, or the check of its draft, depends on tokens that may not have come back."""
    return bool(row.draft) or device.state.is_mask_late(row.start + row.count - device.state.num_prompt)
