import sys

from vllm import LLM

for options, said in (
    ({"data_parallel_size": 2}, "one device"),
    ({"enable_lora": True, "max_loras": 0}, "max_loras"),
    ({"task": "classify"}, "generate text"),
    ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 4}}, "choose one of auto"),
    ({"tokenizer_mode": "mistral"}, "tokenizer.json"),
    ({"runner": "pooling"}, "no embeddings"),
):
    try:
        LLM(model=sys.argv[1], **options)
    except ValueError as error:
        assert said in str(error), error
        print(error)
    else:
        raise AssertionError(f"{options} were taken")
