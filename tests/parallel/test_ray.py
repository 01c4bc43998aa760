"""Ranks on a real Ray cluster of several nodes on this machine, one of which is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.runner.ranks.backends import ray as backend
from penstock.runner.ranks.link import SECRET_VARIABLE
from tests.parallel.roads import alone, answers
from tests.parallel.test_faults import OPTIONS, results
from tests.same_tokens.roads import tiny_llm, tiny_model
from tests.server.running import RunningServer
from tests.server.streams import chats, run_all

LONG = 400  # tokens: Ray takes a moment to notice
SECRET = "0123456789abcdef0123456789abcdef"


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'penstock\[ray\]'"):
        backend.import_ray()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update({SECRET_VARIABLE: SECRET, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    made.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_of_one_process(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_model(tmp_path_factory.mktemp("ray"), "LlamaForCausalLM")
    expected = alone(model)
    node = cluster.add_node(num_cpus=1)
    with tiny_llm(model, pipeline_parallel_size=2, distributed_executor_backend="ray") as llm:
        assert answers(llm) == expected
    cluster.remove_node(node)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lost_node_loses_no_token(cluster: Any, talker: str) -> None:
    """The rank's node is killed under load: the engine's successor places the rank on the other node."""
    nodes = [cluster.add_node(num_cpus=1)]
    options = (*OPTIONS, "-pp", "2", "--distributed-executor-backend", "ray", "--ray-placement", "SPREAD")
    with RunningServer(talker, *options) as server:
        undisturbed = asyncio.run(run_all(server.url, chats(16, LONG)))
        assert all(one.error is None and len(one.token_ids) == LONG for one in undisturbed)
        nodes.append(cluster.add_node(num_cpus=1))

        async def end(counts: list[int]) -> None:
            while sum(count > 2 for count in counts) < 2:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(cluster.remove_node, nodes[0], False)

        said = asyncio.run(run_all(server.url, chats(16, LONG), end))
        assert results(said) == results(undisturbed)
        lost = next(line for line in server.log if "rank 1" in line and "is lost" in line)
        print(lost)
        assert any("requests continue" in line and not line.endswith(" 0 requests continue") for line in server.log)
    cluster.remove_node(nodes[1])
