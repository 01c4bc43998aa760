"""Train an EAGLE-3 head on a model's own answers, on a CPU in minutes, and measure what it is worth.

The model answers questions while a recorder keeps the inputs of three of its layers. One decoder layer then learns to
guess the next tokens from them. It is saved as published EAGLE-3 heads are, and loaded by its folder.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock import LLM, SamplingParams

TOPICS = """rain bread bridges volcanoes bees glaciers music trains chess clouds paper tides coffee maps clocks soap
    lightning gardens whales libraries windmills honey snow rivers glass kites pottery lighthouses forests bicycles
    """.split()
NUM_PASSES, NUM_TEXTS = 2, 4  # of a training step
TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why do people care about {}?",
    "Write a polite letter to a friend about {}.",
    "What is the history of {}?",
)


def make_questions(num: int, topics: Sequence[str], seed: int) -> list[list[dict[str, str]]]:
    every = [task.format(topic) for task in TASKS for topic in topics]
    random.Random(seed).shuffle(every)
    return [[{"role": "user", "content": text}] for text in every[:num]]


class Recorder:
    """Stands where a drafter stands: it is handed what each step computed, and drafts nothing."""

    reads_hidden = False

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.rows: dict[Any, tuple[Any, list[Tensor]]] = {}  # by request: its state, and features of its positions

    def follow(self, plan: Any, rows: Any) -> None:
        pass

    def verify(self, row: Any, device: Any, logits: Any) -> None:
        return None

    def draft(self, plan: Any, rows: Any, computed: Any, results: Any) -> None:
        end = 0
        for row, device in zip(plan.rows, rows):
            end += row.count
            part = torch.cat([tap[end - row.count : end] for tap in computed.taps], -1).clone()
            self.rows.setdefault(device.state.request.id, (device.state, []))[1].append(part)

    def texts(self) -> list[tuple[Tensor, Tensor]]:
        """Return tokens [T] and features [T - 1, 3 C] of every answer with its question."""
        found = []
        for state, parts in self.rows.values():
            features = torch.cat(parts)
            found.append((torch.tensor(state.tokens[: len(features) + 1]), features))
        return found


class Eagle3(nn.Module):
    """The head under the names of published checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.theta = width // self.heads, config["rope_theta"]

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        self.fc = linear(width, len(config["eagle_aux_hidden_state_layer_ids"]) * width)
        self.midlayer = nn.ModuleDict({
            "self_attn": nn.ModuleDict({
                "q_proj": linear(width, 2 * width),
                "k_proj": linear(self.kv_heads * self.size, 2 * width),
                "v_proj": linear(self.kv_heads * self.size, 2 * width),
                "o_proj": linear(width, width),
            }),
            "mlp": nn.ModuleDict({
                "gate_proj": linear(hidden, width),
                "up_proj": linear(hidden, width),
                "down_proj": linear(width, hidden),
            }),
            "hidden_norm": nn.RMSNorm(width, 1e-5),
            "input_layernorm": nn.RMSNorm(width, 1e-5),
            "post_attention_layernorm": nn.RMSNorm(width, 1e-5),
        })  # fmt: skip
        self.norm = nn.RMSNorm(width, 1e-5)
        self.lm_head = linear(config["draft_vocab_size"], width)

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def forward(self, rows: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits of a text's tokens' rows [T, C] with features [T, C] of the places before them."""
        layer: Any = self.midlayer
        given = torch.cat([layer["input_layernorm"](rows), layer["hidden_norm"](features)], -1)
        attention, mlp = layer["self_attn"], layer["mlp"]
        q = self.turn(attention["q_proj"](given).view(len(rows), self.heads, self.size))
        k = self.turn(attention["k_proj"](given).view(len(rows), self.kv_heads, self.size))
        v = attention["v_proj"](given).view(len(rows), self.kv_heads, self.size)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1).transpose(0, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
        x = features + attention["o_proj"](y.transpose(0, 1).reshape(len(rows), -1))
        z = layer["post_attention_layernorm"](x)
        x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](z)) * mlp["up_proj"](z))
        return x, self.lm_head(self.norm(x))


def train(
    head: Eagle3,
    texts: Sequence[tuple[Tensor, Tensor]],
    embed: Any,
    own_ids: Tensor,
    seconds: float,
    num_passes: int = 2,
) -> None:
    """Train for so many seconds. The second pass reads what the first gave, as drafting does after its first token."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.01)
    order, until, step = random.Random(0), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        optimizer.zero_grad()
        total, right, seen = torch.zeros(()), 0, 0
        for tokens, given in order.sample(texts, min(NUM_TEXTS, len(texts))):
            features, rows = head.fc(given), embed(tokens[1:])
            wanted = own_ids[tokens[2:]]
            for number in range(NUM_PASSES):
                features, logits = head(rows[number:], features)
                loss = F.cross_entropy(logits[:-1], wanted[number:], ignore_index=-1)
                total = total + loss * 0.7**number
                if number == 0:
                    right += int((logits[:-1].argmax(-1) == wanted).sum())
                    seen += len(wanted)
                features = features[:-1]
        total.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, max(0.02, (until - time.monotonic()) / (0.7 * seconds)))
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step}: loss {total.item() / NUM_TEXTS:.2f}, {right / seen:.1%} of next tokens right")


def measure(model: str, speculation: dict[str, Any] | None, questions: list[Any], max_tokens: int) -> dict[str, float]:
    """Answer the questions one after the other; returns tokens per second and how drafts turned out."""
    with LLM(model, speculative_config=speculation, progress=False) as llm:
        asked = SamplingParams(temperature=0, max_tokens=max_tokens)
        llm.chat(questions[:1], asked, use_tqdm=False)
        begin, num_tokens = time.perf_counter(), 0
        for question in questions:
            num_tokens += len(llm.chat([question], asked, use_tqdm=False)[0].outputs[0].token_ids)
        rate = num_tokens / (time.perf_counter() - begin)
        stats = llm.stats()
    return {"rate": rate, "drafted": stats["num_draft_tokens"], "accepted": stats["num_accepted_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--folder", type=Path, default=Path("eagle3-head"), help="where the head goes")
    parser.add_argument("--num-answers", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--train-seconds", type=float, default=240)
    parser.add_argument("--vocab", type=int, default=2048, help="tokens that the head can guess")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with LLM(arguments.model, speculative_config=None, enable_prefix_caching=False, progress=False) as llm:
        runner: Any = llm.service.engine.executor
        spec = runner.model.spec
        most = spec.num_layers - 1
        taps = tuple(sorted({min(2, most), spec.num_layers // 2, max(0, most - 2)}))  # EAGLE-3's own choice
        recorder = runner.drafter = Recorder(taps)
        asked = SamplingParams(temperature=0.5, max_tokens=arguments.max_tokens, seed=1)
        llm.chat(make_questions(arguments.num_answers, TOPICS[:-5], 1), asked, use_tqdm=False)
        texts = recorder.texts()
        mixer, rows = spec.layers[0].mixer, runner.model.embedding.tokens
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": spec.width,
            "intermediate_size": spec.width,
            "num_hidden_layers": 1,
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "rope_theta": mixer.rope.theta,
            "rms_norm_eps": 1e-5,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": min(arguments.vocab, spec.vocab_size),
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }
        counted = Counter(int(token) for tokens, _ in texts for token in tokens)
        num = config["draft_vocab_size"]
        common = [token for token, _ in counted.most_common(num)]
        common += [token for token in range(spec.vocab_size) if token not in counted][: num - len(common)]
        ids = torch.tensor(sorted(common))
        own_ids = torch.full((spec.vocab_size,), -1)
        own_ids[ids] = torch.arange(len(ids))
        head = Eagle3(config)
        head.lm_head.weight.data = rows.rows(ids).float().clone()
        print(f"{len(texts)} answers with {sum(len(tokens) for tokens, _ in texts)} tokens; training")
        train(head, texts, lambda tokens: rows.rows(tokens).clone(), own_ids, arguments.train_seconds)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: value.contiguous() for name, value in head.state_dict().items()}
    known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    known[ids] = True
    save_file({**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": known}, arguments.folder / "model.safetensors")
    questions = make_questions(12, TOPICS[-5:], 2)
    off = measure(arguments.model, None, questions, arguments.max_tokens)
    speculation = {"method": "eagle3", "model": str(arguments.folder), "num_speculative_tokens": 4}
    on = measure(arguments.model, speculation, questions, arguments.max_tokens)
    share = on["accepted"] / max(1, on["drafted"])
    print(f"other questions: {share:.1%} of {on['drafted']:.0f} draft tokens accepted")
    print(f"{off['rate']:.0f} tokens/s without, {on['rate']:.0f} with the head: {on['rate'] / off['rate']:.2f} times")


if __name__ == "__main__":
    main()
