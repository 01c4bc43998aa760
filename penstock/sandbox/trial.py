"""A grammar's trial, in a lane of its own."""

from __future__ import annotations

import msgspec

from penstock.sampling.lexicon import Lexicon
from penstock.sampling.trial import on_large_stack, try_grammar
from penstock.sandbox.jobs import CompileGrammar, Tried
from penstock.text.program import LocalProgram, byte_spellings
from penstock.types import StructuredOutputsParams


def make_lexicon(program: LocalProgram) -> Lexicon:
    spelling = program.spelling
    return Lexicon(byte_spellings(spelling, program.vocab_size, program.vocabulary.origin),
                   {id: spelling.alone(id).encode() for id in program.special_ids},
                   lambda text: program.encode(text, add_special_tokens=False))


def run_trial(lexicon: Lexicon, job: CompileGrammar) -> Tried:
    asked = msgspec.convert(job.asked, StructuredOutputsParams)
    return Tried(on_large_stack(lambda: try_grammar(lexicon, asked, job.max_tokens)))
