"""Penstock itself, through the interface `LLM` is made of, one engine step at a time."""

from __future__ import annotations

import time
from typing import Any

from bench.peers.driver import Load, Run, Watch, serve


class Penstock:
    def __init__(self, load: Load) -> None:
        from penstock import LLM

        options = {
            "kv_cache_tokens": 2 * load.max_tokens,
            "max_model_len": load.max_len,
            "threads": load.threads,
            "skip_tokenizer_init": True,
            "speculative_config": "off",  # no peer drafts, and these prompts repeat themselves as no text does
        } | load.options
        self.llm = LLM(load.path, progress=False, **options)
        self.service = self.llm.service

    def facts(self) -> dict[str, Any]:
        from penstock.commands.info import version
        from penstock.ops import cpu

        return {
            "version": version(),
            "cpu_path": cpu.path(),
            "settings": {one.name: one.value for one in self.llm.settings},
        }

    def run(self, run: Run) -> Watch:
        from penstock import SamplingParams
        from penstock.text.prompt_encoder import Encoded

        params = SamplingParams(temperature=0, max_tokens=run.num_output, ignore_eos=True, detokenize=False)
        watch = Watch(len(run.prompts))
        waiting = []
        for index, prompt in enumerate(run.prompts):
            collector = self.service.submit(Encoded(prompt), params)
            collector.listener = lambda delta, index=index: watch.add(index, len(delta.token_ids))
            waiting.append(collector)
        while waiting:
            self.service.step()
            watch.step()
            waiting = [collector for collector in waiting if not collector.finished]
        return watch

    def host(self, prompt: list[int], num_output: int) -> dict[str, Any] | None:
        """Seconds per decode step, and of those outside the model's computation; None if that cannot be told apart."""
        self.run(Run([prompt], num_output))
        clock = _Clock(self.service)
        with clock:
            watch = self.run(Run([prompt], num_output))
        if not clock.inside_s:
            return None
        steps = watch.num_steps
        return {"num_steps": steps, "step_s": watch.total_s / steps, "host_s": (watch.total_s - clock.inside_s) / steps}


class _Clock:
    """Adds up the time inside the runner's computation: recorded steps as they are run, or else the model's calls."""

    def __init__(self, service: Any) -> None:
        runner = getattr(service.engine.executor, "runner", service.engine.executor)
        tapes, model = getattr(runner, "tapes", None), getattr(runner, "model", None)
        calls = [(tapes, "run")] if hasattr(tapes, "run") else [(model, "forward"), (model, "logits")]
        self.calls = [(owner, name) for owner, name in calls if callable(getattr(owner, name, None))]
        self.inside_s = 0.0

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.inside_s += time.perf_counter() - start

        return timed

    def __enter__(self) -> None:
        for owner, name in self.calls:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def __exit__(self, *exception: object) -> None:
        for owner, name in self.calls:
            delattr(owner, name)


if __name__ == "__main__":
    serve(Penstock)
