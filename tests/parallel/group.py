"""Rank processes that are started once, and do one job after another together."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from penstock.ops import cpu
from penstock.parallel import Mesh, Segment, open_mesh

SIZE = 4
JOB_S = 120.0  # a job takes a second or two, on a busy machine more


def serve(pipe: Any, rank: int, addresses: dict[int, str]) -> None:
    """Do jobs until there are no more. Meshes of 1 … SIZE ranks are opened as they are needed, and kept."""
    cpu.set_num_threads(1)
    meshes: dict[int, Mesh] = {}
    while True:
        job = pipe.recv()
        if job is None:
            return
        function, size, given = job
        try:
            if size not in meshes:
                meshes[size] = open_mesh("shm", rank, size, addresses[size], timeout_s=60)
            pipe.send((function(meshes[size], **given), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Group:
    """Processes forked from one that has imported all they need."""

    def __init__(self, size: int = SIZE) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.jobs"])
        self.segments = {each: Segment(each) for each in range(1, size + 1)}
        addresses = {each: segment.address for each, segment in self.segments.items()}
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, addresses), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], **given: Any) -> list[Any]:
        """Call function(mesh, **given) on each of `size` ranks; return what they return."""
        for pipe in self.pipes[:size]:
            pipe.send((function, size, given))
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            assert pipe.poll(JOB_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        for segment in self.segments.values():
            segment.close()
