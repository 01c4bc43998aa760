"""Steps, each given by its sequences: positions computed before, tokens in this step, whether logits are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock import ops
from penstock.engine.plan import Admission, Output, Plan, Row
from penstock.errors import InvalidConfig
from penstock.models.spec import spec_from_config
from penstock.ops.triton.tuning import ATTENTION_TILE_ROWS
from penstock.runner.compile import cross
from penstock.runner.cpu.runner import Runner
from penstock.runner.cuda.decode_graphs import make_decode_graphs
from penstock.runner.step import Step, ends_of
from penstock.sampling.row import Chooser
from penstock.types import Request, SamplingParams
from tests.passes.launches.models import BLOCK_SIZE, Scheme, load, make_memory
from tests.passes.launches.notes import Notes, note_on_cpu, note_on_gpu

CPU, META = torch.device("cpu"), torch.device("meta")
CAPABILITY, NUM_PROCESSORS = (9, 0), 132  # of an H200
MAX_NUM_SEQS = 256
Part = tuple[int, int, bool]


def decoding(count: int, length: int = 17) -> list[Part]:
    return [(length + 3 * (s % 4), 1, True) for s in range(count)]


STEPS: dict[str, list[Part]] = {
    "decode1": decoding(1),
    "decode3": decoding(3),
    "prompt20": [(0, 20, True)],
    "mixed": [*decoding(2), (8, 9, True)],
}
CPU_STEPS = {  # large ones have more tokens than are taped; told ones are asked for log probabilities of the prompt
    "unfinished": [(0, 20, False)],
    "told20": [(0, 20, True)],
    "large": [*decoding(1), (0, 40, True), (0, 40, False)],
    "large+unfinished": [(0, 40, False), (0, 40, False)],
    "told+large": [*decoding(1), (0, 40, True), (0, 40, False)],
}
PASSAGES = {"embed1": [(0, 1, True)], "embed20": [(0, 20, True)], "embed3": [(0, 1, True), (0, 20, True), (0, 9, True)]}
DECODED = (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256)
PROMPTED = (2, 8, 17, 32, 33, 64, 65, 128, 129, 256, 257, 600, 5000)


def plan_of(number: int, sequences: list[Part], num_groups: int, vocab_size: int, pool: bool, told: bool) -> Plan:
    """Make the plan of a step whose rows are all new, each with blocks of its own."""
    rows, admissions, block = [], [], 0
    for s, (start, count, wanted) in enumerate(sequences):
        number_of_row = 1000 * number + s
        tokens = tuple((7 * s + 3 * i) % (vocab_size - 3) + 3 for i in range(start + count))
        blocks = []
        for _ in range(num_groups):
            used = -(-len(tokens) // BLOCK_SIZE)
            blocks.append({i: block + i for i in range(used)})
            block += used
        request = Request(id=str(number_of_row), tokens=tokens, sampling=SamplingParams(temperature=0), pool=pool)
        admissions.append(Admission(number_of_row, request, 0, tokens))
        output = Output.POOL if pool else Output.SAMPLE if wanted else Output.NONE
        rows.append(Row(number_of_row, start, count, output, tuple(blocks), prompt_logprobs=told and count > 1))
    return Plan(number, tuple(rows), tuple(admissions))


def record_on_cpu(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a model on a CPU. Runners themselves take them, a new one each, as they would record them: the
    second step of a shape has a witness of its own."""
    spec = spec_from_config(config)
    model = load(spec, scheme, CPU)
    memory = make_memory(spec, scheme, 64, CPU)
    steps = PASSAGES if spec.is_encoder else STEPS | CPU_STEPS
    for number, (name, sequences) in enumerate(steps.items()):
        told = name.startswith("told")
        plan = plan_of(number, sequences, len(memory.grouping.groups), spec.vocab_size, spec.is_encoder, told)
        runner, results = Runner(model, memory), list[Any]()

        def run(runner: Runner = runner, plan: Plan = plan, results: list[Any] = results) -> None:
            results.append(runner.run(plan))

        notes = note_on_cpu(run)
        assert results[0].error is None and notes.lines, results[0].error
        yield name, notes


class Gpu:
    """Steps of a model that a GPU would take."""

    def __init__(self, config: dict[str, Any], scheme: Scheme, max_model_len: int | None = None) -> None:
        cross.set_target(CAPABILITY)
        self.spec, self.scheme = spec_from_config(config, max_model_len), scheme
        self.model = load(self.spec, scheme, META)
        if not self.spec.is_encoder:
            memory = make_memory(self.spec, scheme, 1, META)
            self.num_groups = len(memory.grouping.groups)
            self.graphs = make_graphs(self.model, memory, scheme)
        self._chooser = Chooser.DEVICE_FILTERED if scheme.exact else Chooser.DEVICE

    def note(self, work: Callable[[], object]) -> Notes:
        """Note what the work launches, or that it is refused. The first time it may make what is kept ever after."""
        try:
            note_on_gpu(work)
            return note_on_gpu(work)
        except InvalidConfig as error:
            return Notes([f"refused: {str(error).split(':')[0]}"], [""])

    def decode(self, count: int, shared: bool = False, longest: int = 1) -> Iterator[tuple[str, Notes]]:
        """Note a step of single tokens as it is recorded in a graph, and the choice from its logits."""
        graphs, made = self.graphs, []
        with torch.inference_mode():
            one = graphs[(count, shared, graphs.num_kv_splits(count, longest))]
        notes = self.note(lambda: made.append(graphs.pool.run(one.forward)))
        yield "", notes
        if made:
            yield "/choice", self.note(lambda: graphs.pool.run(one.sample[self._chooser]))

    def mixed(self, sequences: list[Part], with_ends: bool = True) -> Iterator[tuple[str, Notes]]:
        """Note a step of any rows, single tokens first; without ends as where log probabilities of a prompt are asked
        for."""
        graphs, count = self.graphs, sum(count for _, count, _ in sequences)
        longest = max(start + count for start, count, _ in sequences)
        num_single = sum(count == 1 for _, count, _ in sequences)
        num_at = sum(wanted for _, _, wanted in sequences)
        tiles = sum(-(-count // graphs.tile_tokens) for _, count, _ in sequences[num_single:])
        with torch.inference_mode():
            at, owners = numbers(num_at), numbers(num_at)
            work = ops.Work(num_single, numbers(tiles, 2, dtype=torch.int32), graphs.num_kv_splits(num_single, longest))
            step = Step(
                numbers(count),
                numbers(count),
                [numbers(count) for _ in range(self.num_groups)],
                [numbers(len(sequences), -(-longest // BLOCK_SIZE), dtype=torch.int32) for _ in range(self.num_groups)],
                numbers(len(sequences) + 1, dtype=torch.int32),
                numbers(len(sequences), dtype=torch.int32),
                work,
            )
            ends = ends_of(step, at, owners, graphs.num_kv_splits(num_at, longest))
        made: list[Tensor] = []
        given = (ends, None) if with_ends else (None, at)
        yield "", self.note(lambda: made.append(run_model(self.model, step, graphs.caches, *given)))
        if made and num_at:
            lengths, rows = numbers(num_at, dtype=torch.int32), numbers(num_at, dtype=torch.int32)
            yield "/choice", self.note(lambda: graphs.sample(made[0], lengths, rows, self._chooser))

    def embed(self, sequences: list[Part]) -> Iterator[tuple[str, Notes]]:
        """Note a step of whole sequences, and how they are pooled."""
        count, tiles = (
            sum(count for _, count, _ in sequences),
            sum(-(-count // ATTENTION_TILE_ROWS) for _, count, _ in sequences),
        )
        starts, lengths = (numbers(len(sequences) + more, dtype=torch.int32) for more in (1, 0))
        work = ops.Work(0, numbers(tiles, 2, dtype=torch.int32))
        step = Step(numbers(count), numbers(count), [], [], starts, lengths, work)
        yield "", self.note(lambda: run_encoder(self.model, step))


def make_graphs(model: Any, memory: Any, scheme: Scheme) -> Any:
    """Make a GPU's decode steps."""
    with torch.inference_mode():
        return make_decode_graphs(model, memory, MAX_NUM_SEQS, NUM_PROCESSORS, True, scheme.exact)


def run_model(model: Any, step: Any, caches: Any, ends: Any = None, at: Tensor | None = None) -> Tensor:
    """Compute the logits of a GPU's step as its runner does, of the tokens that `ends` names or of those at `at`. Where
    there are none, hidden states alone."""
    step.ends = ends
    hidden = model.forward(step, caches)
    if not len(hidden):
        return hidden
    return model.logits(hidden if at is None else hidden[at])


def run_encoder(model: Any, step: Any) -> Tensor:
    """Compute the embeddings of a GPU's step."""
    return model.pool(model.forward(step), step.query_start)


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make numbers that only their shape is known of."""
    return torch.empty(shape, dtype=dtype, device=META)


def record_on_gpu(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a tiny model on a GPU."""
    gpu = Gpu(config, scheme)
    steps: dict[str, Iterator[tuple[str, Notes]]] = {}
    if gpu.spec.is_encoder:
        steps = {name: gpu.embed(sequences) for name, sequences in PASSAGES.items()}
    else:
        for name, sequences in STEPS.items():
            single = name.startswith("decode")
            steps[name] = gpu.decode(len(sequences)) if single else gpu.mixed(sequences)
        steps["told20"] = gpu.mixed(STEPS["prompt20"], with_ends=False)
        steps |= {
            "unfinished": gpu.mixed([(0, 20, False)]),
            "mixed+unfinished": gpu.mixed([*decoding(2), (0, 9, False)]),
        }
    for name, noted in steps.items():
        yield from ((name + what, notes) for what, notes in noted)


def record_wide(config: dict[str, Any], scheme: Scheme) -> Iterator[tuple[str, Notes]]:
    """Note the steps of a large model on a GPU, of many numbers of rows: sizes decide which kernels are taken."""
    gpu = Gpu(config, scheme, max_model_len=8192)
    steps = {f"decode{count}": gpu.decode(count) for count in DECODED}
    steps |= {f"decode{count}+long": gpu.decode(count, longest=2000) for count in (1, 8, 33)}
    if not scheme.exact:
        steps |= {f"decode{count}+shared": gpu.decode(count, shared=True, longest=600) for count in (8, 33)}
    steps |= {f"prompt{count}": gpu.mixed([(0, count, True)]) for count in PROMPTED}
    steps |= {f"told{count}": gpu.mixed([(0, count, True)], with_ends=False) for count in (32, 600)}
    steps["mixed"] = gpu.mixed([*decoding(2), (8, 9, True)])
    steps["mixed+many"] = gpu.mixed([*decoding(40), (0, 300, True), (0, 50, False)])
    for name, noted in steps.items():
        yield from ((name + what, notes) for what, notes in noted)
