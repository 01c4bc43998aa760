"""Check the options of several ranks, and derive others from them."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.config.options import EngineConfig
from penstock.config.speculation import MODEL_METHODS, parse_speculation
from penstock.errors import InvalidConfig

RAY_OPTIONS = ("ray_placement",)
NODE_OPTIONS = ("master_addr", "master_port")
LINK_OPTIONS = ("distributed_secret_file", *(f"distributed_tls_{name}" for name in ("certfile", "keyfile", "ca")))
ON_CPUS = "several ranks compute on CPUs only"


class RankFacts(Protocol):
    """Facts of a model that ranks depend on."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_cores(self) -> int: ...

    @property
    def num_threads(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def whole_prompts(self) -> bool: ...


def count_ranks(config: EngineConfig) -> int:
    return config.tensor_parallel_size * config.pipeline_parallel_size


def check_layout(config: EngineConfig) -> None:
    """Refuse sizes, machines and files that do not go together; needs no model."""
    num_ranks = count_ranks(config)
    if config.distributed_executor_backend == "ray" and config.nnodes > 1:
        raise InvalidConfig(
            f"nnodes={config.nnodes} does not go with distributed_executor_backend=ray, which chooses machines itself: "
            "leave nnodes out, or set distributed_executor_backend=mp"
        )
    if num_ranks % config.nnodes:
        raise InvalidConfig(
            f"{num_ranks} ranks (tensor_parallel_size={config.tensor_parallel_size} times "
            f"pipeline_parallel_size={config.pipeline_parallel_size}) do not divide into "
            f"nnodes={config.nnodes} machines: set nnodes to a divisor of {num_ranks}"
        )
    if num_ranks // config.nnodes % config.tensor_parallel_size:
        raise InvalidConfig(
            f"tensor_parallel_size={config.tensor_parallel_size} ranks would not be on one machine: each of "
            f"nnodes={config.nnodes} has {num_ranks // config.nnodes}; raise pipeline_parallel_size instead"
        )
    if config.node_rank >= config.nnodes:
        raise InvalidConfig(
            f"node_rank={config.node_rank} is not under nnodes={config.nnodes}: number the machines from 0"
        )
    files = (config.distributed_tls_certfile, config.distributed_tls_keyfile, config.distributed_tls_ca)
    if any(files) and not all(files):
        raise InvalidConfig(
            "TLS between ranks needs distributed_tls_certfile, distributed_tls_keyfile and distributed_tls_ca: give "
            "all three, or none"
        )


def find_idle_ranks(config: EngineConfig) -> dict[str, str]:
    """Return options that the user set but that this layout does not need, with the reasons."""
    idle: dict[str, str] = {}
    if count_ranks(config) == 1:
        alone = "there is one rank, which runs in the engine's process"
        idle |= dict.fromkeys(("distributed_executor_backend", *RAY_OPTIONS, *NODE_OPTIONS, *LINK_OPTIONS), alone)
    elif config.distributed_executor_backend == "ray":
        idle |= dict.fromkeys(NODE_OPTIONS, "Ray chooses the machines")
    else:
        idle |= dict.fromkeys(RAY_OPTIONS, f"distributed_executor_backend={config.distributed_executor_backend}")
        if config.nnodes == 1:
            idle |= dict.fromkeys(NODE_OPTIONS, "nnodes=1")
            idle |= dict.fromkeys(LINK_OPTIONS, "ranks of one machine get a secret from the engine")
    if config.tensor_parallel_size == 1:
        idle["enable_expert_parallel"] = "tensor_parallel_size=1"
    return {name: why for name, why in idle.items() if getattr(config, name) != getattr(EngineConfig, name)}


def resolve_ranks(config: EngineConfig, facts: RankFacts) -> dict[str, tuple[Any, str]]:
    """Refuse what several ranks cannot do with this model; returns the threads of each, with the reason."""
    check_layout(config)
    among = f", for {facts.num_replicas} replicas" if facts.num_replicas > 1 else ""
    num_ranks, num_stages = count_ranks(config), config.pipeline_parallel_size
    if num_ranks == 1:
        return {} if config.threads else {"threads": (facts.num_threads, f"the cores this process may use{among}")}
    if num_stages > facts.num_layers:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is over the model's {facts.num_layers} layers: set at most "
            f"{facts.num_layers}"
        )
    if facts.whole_prompts:
        raise InvalidConfig(
            f"{num_ranks} ranks cannot share an embedding model, which fits on one: leave tensor_parallel_size and "
            "pipeline_parallel_size out"
        )
    if config.device == "cuda":
        raise InvalidConfig(f"device=cuda takes one rank, but {num_ranks} are asked for: {ON_CPUS}; set device=cpu")
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and (speculation.method in MODEL_METHODS or speculation.tree):
        what = "tree=true" if speculation.tree else f"method={speculation.method}"
        raise InvalidConfig(
            f"speculative_config: {what} needs all layers in one process, but there are {num_ranks} ranks: choose "
            "ngram or suffix without tree, or leave it out"
        )
    if config.nnodes > 1 and facts.num_replicas > 1:
        raise InvalidConfig(
            f"nnodes={config.nnodes} is for one engine, but data_parallel_size={facts.num_replicas}: start one server "
            "for each, and penstock route in front of them"
        )
    if config.threads is not None:
        return {}
    if config.distributed_executor_backend == "ray":
        return {"threads": (1, "the CPUs that Ray reserves for a rank")}
    threads = max(1, facts.num_threads * config.nnodes // num_ranks)
    return {"threads": (threads, f"this rank's share of the {facts.num_cores} cores{among}")}
