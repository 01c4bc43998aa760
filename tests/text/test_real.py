"""The tokenizers of the two models that `make test` fetches, against slow and plain implementations."""

from __future__ import annotations

import random

import pytest

from penstock.hub import list_models
from penstock.models.files.gguf import GgufFile
from penstock.text.answers import Detokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer

K = "tokenizer.ggml."
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXT = """Penstock reads 1,234 pages; isn't that    nice?\r\n\tdef f(x):\n        return x ** 2

Größe, naïveté, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 日本語の文章、中文句子。한국어 e\u0301 \u00a0 \u200b
👩‍🚀🏳️‍🌈 ∑∫√ → ½ ² <b>bold</b> http://example.org/?q=a%20b&c=[1]\\n {"key": "value"} ________ ---- ====\n\n\n"""


FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}


@pytest.fixture(scope="module", params=FILES)
def model(request) -> tuple[str, dict, Tokenizer]:
    path = {model.path.name: model.path for model in list_models()}.get(FILES[request.param])
    if path is None:
        pytest.skip(f"{request.param} is not on this machine; penstock pull {request.param} fetches it")
    file = GgufFile(path)
    metadata = dict(file.metadata)
    file.close()
    return request.param, metadata, Tokenizer.from_gguf(metadata, path.name)


def texts() -> list[str]:
    rng = random.Random(3)
    slices = [sorted(rng.choices(range(len(TEXT) + 1), k=2)) for _ in range(40)]
    shuffled = ["".join(rng.choices(TEXT, k=30)) for _ in range(40)]
    return ["", " ", "Hello world", TEXT, *(TEXT[begin:end] for begin, end in slices), *shuffled]


def test_encodes_as_written_on_paper(model, naive_bytes, naive_pieces):
    name, metadata, tokenizer = model
    naive = naive_bytes(metadata, [r"\p{N}", GPT2]) if name == "smollm2" else naive_pieces(metadata)
    for text in texts():
        assert tokenizer.encode(text, add_special_tokens=False) == naive.encode(text), text


def test_text_comes_back_whole_in_one_piece_or_in_many(model):
    _, _, tokenizer = model
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        parts = [detokenizer.push([id]) for id in ids]
        assert "".join(parts) + detokenizer.finish() == text
        assert not any("\ufffd" in part for part in parts)


def test_known_encodings_and_ends(model):
    name, _, tokenizer = model
    if name == "smollm2":
        assert tokenizer.encode("Hello world") == [19556, 905]
        assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
        assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (49152, (2,), 1)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.encode(text, add_special_tokens=False).count(2) == 2
    else:
        assert tokenizer.encode("Hello world") == [2, 9259, 1902]
        assert tokenizer.encode("<start_of_turn>user\n", add_special_tokens=False) == [105, 2364, 107]
        assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (262144, (1,), 2)
        assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
