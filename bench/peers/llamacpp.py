"""llama.cpp through its own batch interface, as bound by llama-cpp-python.

LLAMA_CPP_LIB_PATH names the folder of its shared libraries. The context is as llama-batched-bench makes it: a cache of
its own for each sequence (f16), flash attention as llama.cpp decides, prompts of all sequences in one batch. Where a
prefix is shared by hand the sequences have one cache together, so that nothing is copied: that was 7 to 15 % faster.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from bench.peers.driver import ROOM, Load, Run, Watch, serve

LOG_ERROR = 4


class LlamaCpp:
    def __init__(self, load: Load) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.threads = load.threads
        self._log = llama_cpp.llama_log_callback(_errors_only)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(load.path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {load.path}")
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.shape: tuple[int, int, bool] | None = None
        self.context: Any = None
        self.batch: Any = None

    def facts(self) -> dict[str, Any]:
        return {"version": self.api.__version__, "system": self.api.llama_print_system_info().decode().strip()}

    def _open(self, num_seqs: int, num_tokens: int, unified: bool) -> None:
        """A context for so many sequences and tokens in all; kept while the next case needs the same."""
        if self.shape == (num_seqs, num_tokens, unified):
            return
        api = self.api
        if self.context:
            api.llama_free(self.context)
            api.llama_batch_free(self.batch)
        params = api.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_seq_max = num_seqs
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = unified
        params.no_perf = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_tokens} tokens")
        self.num_batch = api.llama_n_batch(self.context)
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(self.num_batch, 0, 1)
        self.shape = num_seqs, num_tokens, unified

    def run(self, run: Run) -> Watch:
        length = len(run.prompts[0]) + run.num_output + ROOM
        self._open(len(run.prompts), len(run.prompts) * -(-length // 256) * 256, run.by_hand)
        self.api.llama_memory_clear(self.memory, False)
        watch = Watch(len(run.prompts))
        tokens = self._prompts(run)
        while True:
            for index in range(len(tokens)):
                watch.add(index)
            watch.step()
            if watch.num_steps == run.num_output:
                return watch
            at = [len(prompt) + watch.num_steps - 1 for prompt in run.prompts]
            rows = [(token, position, index, True) for index, (token, position) in enumerate(zip(tokens, at))]
            tokens = self._decode(rows)

    def _prompts(self, run: Run) -> list[int]:
        """Compute all prompts; the first token of each answer."""
        first = 0
        if run.by_hand and run.num_shared:
            first = run.num_shared
            self._decode([(token, at, 0, False) for at, token in enumerate(run.prompts[0][:first])])
            for sequence in range(1, len(run.prompts)):
                self.api.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        rows = [
            (prompt[at], at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(run.prompts)
            for at in range(first, len(prompt))
        ]
        return self._decode(rows)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows are (token, position, sequence, whether its output is wanted); the likeliest token of each wanted."""
        chosen: list[int] = []
        for start in range(0, len(rows), self.num_batch):
            part = rows[start : start + self.num_batch]
            batch = self.batch
            batch.n_tokens = len(part)
            for index, (token, position, sequence, wanted) in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = wanted
            code = self.api.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {code}")
            self.api.llama_synchronize(self.context)
            chosen += self._likeliest(sum(row[3] for row in part))
        return chosen

    def _likeliest(self, count: int) -> list[int]:
        import numpy as np

        if not count:
            return []
        logits = ctypes.cast(self.api.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        rows: list[int] = np.ctypeslib.as_array(logits, (count, self.num_vocab)).argmax(axis=1).tolist()
        return rows


def _errors_only(level: int, text: bytes, data: Any) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    serve(LlamaCpp)
