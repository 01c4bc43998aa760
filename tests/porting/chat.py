import argparse
import sys

from vllm import LLM, EngineArgs

parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
parser.set_defaults(model=sys.argv[1])
parser.add_argument("--max-tokens", type=int)
args = vars(parser.parse_args(["--max-tokens", "6", "--enforce-eager", "--tensor-parallel-size", "1"]))
max_tokens = args.pop("max_tokens")
llm = LLM(**args)

params = llm.get_default_sampling_params()
params.max_tokens = max_tokens
params.temperature = 0.0
params.ignore_eos = True
conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a penstock?"}]
one = llm.chat(conversation, params, use_tqdm=False)
ten = llm.chat([conversation] * 10, sampling_params=params, use_tqdm=True)
assert [output.outputs[0].text for output in ten] == [one[0].outputs[0].text] * 10

other = llm.chat(
    conversation,
    params,
    use_tqdm=False,
    chat_template="{{ messages[-1]['content'] }}:",
    add_generation_prompt=True,
    chat_template_content_format="auto",
)
assert other[0].prompt == "what is a penstock?:"

tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
print(llm.chat(conversation, params, tools=tools, use_tqdm=False)[0].outputs[0].text)

tokenizer = llm.get_tokenizer()
prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
same = llm.generate({"prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=False)}, params, use_tqdm=False)
assert same[0].outputs[0].token_ids == one[0].outputs[0].token_ids
text = tokenizer.decode(same[0].outputs[0].token_ids, skip_special_tokens=True)
assert text == same[0].outputs[0].text
