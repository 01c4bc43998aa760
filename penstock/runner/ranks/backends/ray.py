"""Ranks on the machines of a Ray cluster: Ray chooses machines and starts processes, and carries nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.errors import InvalidConfig
from penstock.runner.ranks.backends.local import STOP_S, start_rank, stop
from penstock.runner.ranks.backends.task import COMMAND, RankTask, decode_task

_log = logging.getLogger(__name__)
INSTALL = "distributed_executor_backend=ray needs Ray: pip install 'penstock[ray]', on all machines"


def import_ray() -> Any:
    try:
        import ray
        import ray.util
        import ray.util.placement_group
    except ImportError:
        raise InvalidConfig(INSTALL) from None
    return ray


def join_cluster() -> tuple[Any, bool]:
    """Join the running cluster; returns Ray, and True if this process was not in it before."""
    ray = import_ray()
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InvalidConfig(
            f"no Ray cluster answers ({str(error).splitlines()[0]}): start one with `ray start --head`, or set "
            "RAY_ADDRESS"
        ) from None
    return ray, True


class RankHost:
    """An actor: a rank's process on the machine that Ray has chosen. It ends with the actor's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, line: bytes) -> int:
        """Start the process; returns its exit status when it ends."""
        self._process = start_rank(decode_task(line), COMMAND)
        return self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            stop({0: self._process})


class RayRanks:
    """`make` gives the tasks, once rank 0's port is known; `num_cpus` are reserved for each rank."""

    def __init__(self, make: Callable[[int], Sequence[RankTask]], num_cpus: int, placement: str) -> None:
        self._make, self._num_cpus, self._placement = make, num_cpus, placement
        self._ray, self._has_joined = join_cluster()
        self._group: Any = None
        self._hosts: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}

    @property
    def address(self) -> str:
        """This machine's address in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, port: int) -> None:
        ray, tasks = self._ray, self._make(port)
        self._note_room(len(tasks))
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [{"CPU": self._num_cpus}] * len(tasks)
        self._group = ray.util.placement_group(bundles, strategy=self._placement)
        host = ray.remote(RankHost)
        for index, task in enumerate(tasks):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = host.options(
                num_cpus=self._num_cpus, max_concurrency=2, max_restarts=0, scheduling_strategy=strategy
            ).remote()
            self._hosts[task.rank], self._runs[task.rank] = actor, actor.run.remote(task.line)

    def _note_room(self, num_ranks: int) -> None:
        """Say that ranks must wait for machines, where the cluster has too few."""
        alive = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        room = sum(int(cpus // self._num_cpus) for cpus in alive)
        if room < num_ranks:
            _log.warning(
                "%d ranks of %d CPUs wait for machines: the Ray cluster's %d have room for %d of them",
                num_ranks,
                self._num_cpus,
                len(alive),
                room,
            )

    def find_dead(self) -> str | None:
        """Return which rank's process or machine is gone."""
        ended, _ = self._ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=0)
        for rank, run in self._runs.items():
            if run in ended:
                try:
                    return f"rank {rank} ended with status {self._ray.get(run)}"
                except self._ray.exceptions.RayError as error:
                    return f"rank {rank} is lost: {str(error).splitlines()[0]}"
        return None

    def kill(self) -> None:
        for host in self._hosts.values():
            with suppress(Exception):  # it is gone already
                self._ray.kill(host)

    def close(self) -> None:
        ray = self._ray
        if self._runs:
            ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=STOP_S)
        self.kill()
        if self._group is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(self._group)
        if self._has_joined:
            ray.shutdown()
