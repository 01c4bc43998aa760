"""Options of several ranks: what cannot be is refused in one line, before anything is started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api.ranks.ranks import make_tasks
from penstock.config import EngineConfig, Facts, resolve
from penstock.errors import InvalidConfig
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops import cpu
from penstock.passes.stages import cut_stages
from penstock.runner.ranks.layout import RankLayout
from tests.parallel.processes import ranks_of
from tests.same_tokens.roads import tiny_llm, tiny_model

FACTS = Facts(1024, 100, 1 << 30, 8, num_layers=4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5 is over the model's 4 layers: set at most 4"),
        ({"pipeline_parallel_size": 3, "nnodes": 2}, "3 ranks .* do not divide into nnodes=2 machines"),
        ({"pipeline_parallel_size": 2, "nnodes": 2, "node_rank": 2}, "node_rank=2 is not under nnodes=2"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "tensor_parallel_size=2 ranks would not be on one machine"),
        ({"nnodes": 2, "distributed_executor_backend": "ray"}, "nnodes=2 does not go with"),
        ({"pipeline_parallel_size": 2, "device": "cuda"}, "device=cuda takes one rank, but 2 are asked for"),
        ({"distributed_tls_ca": "ca.pem"}, "give all three, or none"),
        (
            {"tensor_parallel_size": 2, "speculative_config": '{"method": "ngram", "tree": true}'},
            "tree=true needs all layers in one process",
        ),
        (
            {"pipeline_parallel_size": 2, "speculative_config": '{"method": "self"}'},
            "method=self needs all layers in one process",
        ),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve(EngineConfig(**options), FACTS)


def test_threads_are_shared() -> None:
    settings = resolve(EngineConfig(pipeline_parallel_size=2, tensor_parallel_size=2), FACTS)
    assert settings.threads == 2 and settings.device == "cpu"
    assert resolve(EngineConfig(pipeline_parallel_size=2, nnodes=2), FACTS).threads == 8


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's threads and those of its other ranks, over all replicas, are no more than the cores."""
    monkeypatch.setattr(cpu, "available_cores", lambda: 8)
    config = EngineConfig(tensor_parallel_size=2)
    for num_replicas, threads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        facts = replace(FACTS, num_replicas=num_replicas)
        assert resolve(config, facts).threads == threads
        (task,) = make_tasks(config, "model", 0, ("127.0.0.1", 1), None, num_replicas)
        assert task.threads == threads


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel_size": 3}, r"does not divide the model's .*: use one of the sizes 1, 2"),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, "--distributed-secret-file, or set PENSTOCK_DISTRIBUTED_SECRET"),
        ({"pipeline_parallel_size": 2, "nnodes": 2, "node_rank": 1}, "run penstock serve with it there"),
    ],
)
def test_refused_by_a_model(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    before = set(ranks_of(os.getpid()))
    with pytest.raises(InvalidConfig, match=message):
        tiny_llm(tiny_model(tmp_path, "LlamaForCausalLM"), **options)
    assert set(ranks_of(os.getpid())) <= before


def test_stages_are_balanced() -> None:
    """By what a step reads: layers, and the head in the last stage."""
    spec = spec_from_config({**FAMILIES["LlamaForCausalLM"].like[0], "architectures": ["LlamaForCausalLM"]})
    layers = spec.layers[:1] * 12
    large = type(spec)(**{**vars(spec), "layers": layers})
    assert cut_stages(large, 1) == [range(12)]
    for count in (2, 3, 5, 12):
        stages = cut_stages(large, count)
        assert [layer for stage in stages for layer in stage] == list(range(12))
        assert all(len(stages[-1]) <= len(stage) for stage in stages)  # it has the head, too
        assert max(map(len, stages)) - min(map(len, stages[:-1])) <= 1


def test_stages_of_experts_are_balanced_by_those_chosen() -> None:
    """A layer of many experts is large, but a token goes through few: it weighs about as much as a dense one."""
    like, names = FAMILIES["MixtralForCausalLM"].like[0], ["MixtralForCausalLM"]
    sizes = {"num_local_experts": 64, "num_experts_per_tok": 1, "num_hidden_layers": 2, "tie_word_embeddings": True}
    mixture = spec_from_config({**like, **sizes, "architectures": names, "vocab_size": 8})
    dense = spec_from_config({**FAMILIES["LlamaForCausalLM"].like[0], "architectures": ["LlamaForCausalLM"]})
    layers = (*mixture.layers, *dense.layers[:1] * 6)
    assert [len(stage) for stage in cut_stages(replace(mixture, layers=layers), 2)] in ([3, 5], [4, 4])


def test_places_of_ranks() -> None:
    layout = RankLayout(num_shards=2, num_stages=3, num_nodes=3)
    assert [layout.stage(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    assert [layout.node(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.find_next(rank) for rank in range(6)] == [None, None, 0, 1, 2, 3]
    assert layout.list_ranks(1) == [2, 3]
