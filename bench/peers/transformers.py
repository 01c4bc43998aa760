"""Hugging Face transformers: `generate` with its cache."""

from __future__ import annotations

from typing import Any

from bench.peers.driver import Load, Run, Watch, serve
from bench.peers.torch_cpu import best_dtype, hold_to_avx2


class Transformers:
    def __init__(self, load: Load) -> None:
        import torch

        if load.cpu == "avx2":
            hold_to_avx2()
        torch.set_num_threads(load.threads)
        self.dtype = load.options.get("dtype") or best_dtype(load.cpu)
        self.model = _model(load.path, getattr(torch, self.dtype))
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def facts(self) -> dict[str, Any]:
        import torch
        import transformers

        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "held": self.dtype,
            "capability": torch.backends.cpu.get_cpu_capability(),
        }

    def run(self, run: Run) -> Watch:
        import torch

        ids = torch.tensor(run.prompts)
        with torch.inference_mode():
            streamer = _Streamer(len(run.prompts))
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=run.num_output,
                streamer=streamer,
            )
        return streamer.watch


def _model(path: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


class _Streamer:
    """Is given the prompts first, then the tokens of each step."""

    def __init__(self, num_seqs: int) -> None:
        self.watch = Watch(num_seqs)
        self._prompts_seen = False

    def put(self, tokens: Any) -> None:
        if not self._prompts_seen:
            self._prompts_seen = True
            return
        for index in range(len(tokens)):
            self.watch.add(index)
        self.watch.step()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    serve(Transformers)
