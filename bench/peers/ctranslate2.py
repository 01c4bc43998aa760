"""CTranslate2: the model converted to int8 by its own converter, then its generator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.peers.driver import Load, Run, Watch, serve


class CTranslate2:
    def __init__(self, load: Load) -> None:
        import ctranslate2

        self.kind = load.options.get("compute_type", "int8")
        folder = Path(load.work) / f"{Path(load.path).name}-ct2-{self.kind}"
        if not (folder / "model.bin").exists():
            converter = ctranslate2.converters.TransformersConverter(load.path)
            converter.convert(str(folder), quantization=self.kind, force=True)
        self.tokens: list[str] = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self.generator = ctranslate2.Generator(
            str(folder), compute_type=self.kind, inter_threads=1, intra_threads=load.threads
        )

    def facts(self) -> dict[str, Any]:
        import ctranslate2

        return {"version": ctranslate2.__version__, "held": self.generator.compute_type}

    def run(self, run: Run) -> Watch:
        prompts = [[self.tokens[token] for token in prompt] for prompt in run.prompts]
        watch = Watch(len(prompts))

        def seen(step: Any) -> bool:
            watch.add(step.batch_id)
            if min(watch.counts) == max(watch.counts):  # the last sequence of this step
                watch.step()
            return False

        self.generator.generate_batch(
            prompts,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            min_length=run.num_output,
            max_length=run.num_output,
            callback=seen,
        )
        return watch


if __name__ == "__main__":
    serve(CTranslate2)
