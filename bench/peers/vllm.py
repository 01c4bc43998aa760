"""vLLM on the CPU: its `LLM` class in this process, one engine step at a time."""

from __future__ import annotations

import os
from typing import Any

from bench.peers.driver import Load, Run, Watch, serve
from bench.peers.torch_cpu import best_dtype, hold_to_avx2

CACHE_GIB = "2"


class Vllm:
    def __init__(self, load: Load) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{load.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if load.cpu == "avx2":
            hold_to_avx2()
        from vllm import LLM

        self.dtype = load.options.get("dtype") or best_dtype(load.cpu)
        options = {
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "max_num_seqs": load.max_seqs,
            "max_model_len": load.max_len,
            "seed": 0,
        } | load.options
        self.engine = LLM(load.path, **options | {"dtype": self.dtype}).llm_engine
        self.num_requests = 0

    def facts(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__, "held": self.dtype}

    def run(self, run: Run) -> Watch:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=run.num_output,
            min_tokens=run.num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        places = {}
        watch = Watch(len(run.prompts))
        for index, prompt in enumerate(run.prompts):
            self.num_requests += 1
            places[str(self.num_requests)] = index
            self.engine.add_request(str(self.num_requests), TokensPrompt(prompt_token_ids=prompt), params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                watch.add(places[output.request_id], len(output.outputs[0].token_ids))
            watch.step()
        return watch


if __name__ == "__main__":
    serve(Vllm)
