"""CUDA graphs: half a step is launched kernel by kernel until it is captured, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Made = TypeVar("Made")


@dataclass
class Half(Generic[Made]):
    """Half a step: the forward pass, or sampling. Without a graph its kernels are launched one by one."""

    function: Callable[[], Made]
    is_forward: bool = False
    made: Made | None = None
    graph: torch.cuda.CUDAGraph | None = None
    num_runs: int = 0


class Borrowed:
    """Memory at the address of a tensor, without owning it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        data = tensor.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a captured graph's output that leaves its memory to later captures: only one step's is in use."""
    return torch.as_tensor(Borrowed(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


class GraphPool:
    """Captures and replays halves of steps. All forward passes share memory: a step's logits are read before the next
    forward pass. Sampling has a pool of its own, so that it never writes where logits lie."""

    def __init__(self, eager: bool, max_num_seqs: int) -> None:
        self.eager, self.can_capture = eager, not eager
        self.has_idle_moments = False  # in which the engine captures what it will need
        self.num_captures = 0
        self._max_num_seqs = max_num_seqs
        self._sampling_pool = None if eager else torch.cuda.graph_pool_handle()
        self._forward_pool: torch.cuda.MemPool | None = None
        self._stream: torch.cuda.Stream | None = None  # of captures: memory is given again on the same stream only
        self._last_eager: Half[torch.Tensor] | None = None

    def run(self, half: Half[Made]) -> Made:
        """Run half a step. The second run captures it, which takes the host as long as launching it. Sampling is
        captured after the forward pass whose logits it reads: they stay in one place only from then on."""
        if half.graph is None and half.num_runs and self.can_capture:
            self.capture(half)
        if half.graph is not None:
            half.graph.replay()
        else:
            half.made = half.function()
            if half.is_forward:
                self._keep_only(half)
        half.num_runs += 1
        assert half.made is not None
        return half.made

    def _keep_only(self, half: Half[Any]) -> None:
        """Drop the logits of the last forward pass that was not captured. The first time, reserve memory for the
        logits of the largest batch, into which those of smaller ones fit."""
        last, self._last_eager = self._last_eager, half
        if last is not None and last is not half and last.graph is None:
            last.made = None
        logits: Any = half.made
        if self._forward_pool is None and not self.eager:
            self._forward_pool = torch.cuda.MemPool()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._forward_pool):
                logits.new_empty((self._max_num_seqs, logits.shape[1]))

    def capture(self, half: Half[Any]) -> None:
        """Capture half a step. Its kernels have been compiled and have run in some step before."""
        pool: Any = self._forward_pool.id if half.is_forward and self._forward_pool else self._sampling_pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            made = half.function()
        half.made, half.graph = borrow(made) if half.is_forward else made, graph
        self.num_captures += 1

    def prepare(self, forward: Half[Any], sample: Half[Any]) -> None:
        """Capture a step whose inputs are those of padding rows. It runs once before: a capture can load no kernel."""
        if forward.graph is not None:
            forward.graph.replay()
        else:
            forward.made = forward.function()
            self._keep_only(forward)
        if sample.graph is None:
            sample.made = sample.function()
        for half in (forward, sample):
            if half.graph is None:
                self.capture(half)

    def forget(self) -> None:
        self._last_eager = None
