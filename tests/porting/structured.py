import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

llm = LLM(
    model=sys.argv[1],
    max_model_len=200,
    guided_decoding_backend="xgrammar",
    structured_outputs_config={"backend": "guidance"},
)
schema = {
    "type": "object",
    "properties": {"brand": {"enum": ["a", "b"]}, "year": {"type": "integer"}},
    "required": ["brand", "year"],
    "additionalProperties": False,
}
sql = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "x" | "y"'


def ask(**asked: object) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputsParams(**asked))
    return llm.generate("write it", sampling_params=params, use_tqdm=False)[0].outputs[0].text


assert ask(choice=["positive", "negative"]) in ("positive", "negative")
assert re.fullmatch(r"\w{2,5}@\w{2,5}\.com", ask(regex=r"\w{2,5}@\w{2,5}\.com"))
assert json.loads(ask(json=schema))["brand"] in ("a", "b")
assert ask(grammar=sql) in ("SELECT x FROM t", "SELECT y FROM t")

older = SamplingParams(max_tokens=60, guided_decoding=GuidedDecodingParams(json=json.dumps(schema), backend="outlines"))
print(json.loads(llm.generate(["write it"], older, use_tqdm=False)[0].outputs[0].text))
