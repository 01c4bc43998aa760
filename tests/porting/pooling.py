import sys

from vllm import LLM

llm = LLM(model=sys.argv[1], runner="pooling", enforce_eager=True)
texts = ["the cat sat", "the dog ran", "one two three"]
outputs = llm.embed(texts)
assert len({output.outputs.hidden_size for output in outputs}) == 1
print([output.outputs.embedding[:2] for output in outputs])
assert llm.encode(texts[0], pooling_task="embed")[0].outputs.data.tolist() == outputs[0].outputs.embedding

for text, output in zip(texts, llm.score(texts[0], texts)):
    print(f"{output.outputs.score:+.3f} {text}")
assert llm.score(texts[0], texts)[0].outputs.score > 0.999
