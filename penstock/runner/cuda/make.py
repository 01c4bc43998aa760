"""Make the runner of a GPU by an engine's settings."""

from __future__ import annotations

from penstock.config import Resolved
from penstock.draft.drafters import Drafters
from penstock.models.decoder import Decoder, Encoder
from penstock.runner.cuda.encoder import EncoderRunner
from penstock.runner.cuda.runner import CudaRunner
from penstock.runner.loras import LoraBank
from penstock.runner.memory import BlockMemory
from penstock.runner.store.blocks import BlockStore
from penstock.sampling.grammar.compiler import GrammarCompiler


def make_runner(
    model: Decoder | Encoder,
    memory: BlockMemory,
    settings: Resolved,
    grammars: GrammarCompiler | None,
    drafters: Drafters | None,
    store: BlockStore | None,
    bank: LoraBank | None,
) -> CudaRunner | EncoderRunner:
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if isinstance(model, Encoder):
        return EncoderRunner(model, seqs, tokens, memory.blocks.device, settings.deterministic)
    eager, deterministic = settings.enforce_eager, settings.deterministic
    runner = CudaRunner(model, memory, grammars, seqs, tokens, eager, deterministic, drafters)
    runner.store, runner.loras = store, bank
    return runner
