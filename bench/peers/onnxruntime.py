"""ONNX Runtime GenAI: the model built as int4 by its own builder, then its generator, one token at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers.driver import Load, Run, Watch, serve


class OnnxRuntime:
    def __init__(self, load: Load) -> None:
        import onnxruntime_genai

        self.precision = load.options.get("precision", "int4")
        folder = Path(load.work) / f"{Path(load.path).name}-onnx-{self.precision}"
        if not (folder / "genai_config.json").exists():
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "onnxruntime_genai.models.builder",
                    "-m",
                    load.path,
                    "-i",
                    load.path,
                    "-o",
                    str(folder),
                    "-p",
                    self.precision,
                    "-e",
                    "cpu",
                ],
                check=True,
                stdout=sys.stderr,
            )
        config = onnxruntime_genai.Config(str(folder))
        options = {"intra_op_num_threads": load.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.api = onnxruntime_genai
        self.model = onnxruntime_genai.Model(config)

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"version": version("onnxruntime-genai"), "onnxruntime": version("onnxruntime"), "held": self.precision}

    def run(self, run: Run) -> Watch:
        import numpy as np

        length = len(run.prompts[0]) + run.num_output
        params = self.api.GeneratorParams(self.model)
        params.set_search_options(max_length=length, min_length=length, batch_size=len(run.prompts), do_sample=False)
        generator = self.api.Generator(self.model, params)
        prompts = np.array(run.prompts, np.int32)
        watch = Watch(len(run.prompts))
        generator.append_tokens(prompts)
        while not generator.is_done():
            generator.generate_next_token()
            for index in range(len(run.prompts)):
                watch.add(index)
            watch.step()
        return watch


if __name__ == "__main__":
    serve(OnnxRuntime)
