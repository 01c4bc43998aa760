"""OpenVINO GenAI: its continuous batching pipeline, one step at a time, on a GGUF file that it converts itself."""

from __future__ import annotations

from typing import Any

from bench.peers.driver import Load, Run, Watch, serve

CACHE_GB = 2


class OpenVino:
    def __init__(self, load: Load) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = load.max_seqs
        scheduler.max_num_batched_tokens = 2048
        properties = {"INFERENCE_NUM_THREADS": load.threads} | load.options
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(load.path, scheduler, "CPU", properties)
        self.num_requests = 0

    def facts(self) -> dict[str, Any]:
        import openvino_genai

        return {"version": openvino_genai.get_version(), "held": "Q4_0 GGUF"}

    def run(self, run: Run) -> Watch:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = run.num_output
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in run.prompts]
        watch = Watch(len(run.prompts))
        handles = []
        for tensor in inputs:
            self.num_requests += 1
            handles.append(self.pipeline.add_request(self.num_requests, tensor, config))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    watch.add(index, sum(len(output.generated_ids) for output in handle.read().values()))
            watch.step()
        return watch


if __name__ == "__main__":
    serve(OpenVino)
