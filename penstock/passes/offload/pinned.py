"""Page-locked host memory: a GPU copies from it without waiting for the host, and kernels can read it in place."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidConfig

GIB = 1 << 30
PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister
PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PinnedPages(mmap.mmap):
    """Pages of their own, exactly as many as are needed: torch's allocator of pinned memory rounds up to a power of
    two."""

    address = 0  # once they are locked

    @classmethod
    def lock(cls, num_bytes: int) -> PinnedPages:
        pages = cls(-1, num_bytes, flags=PRIVATE)
        if HUGE_PAGES is not None:
            with contextlib.suppress(OSError):  # advice may be refused
                pages.madvise(HUGE_PAGES)
        place = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        error = int(_cuda_runtime().cudaHostRegister(place, num_bytes, PORTABLE_AND_MAPPED))
        if error:
            raise InvalidConfig(
                f"cpu_offload_gb: {num_bytes / GIB:.2f} GiB of memory could not be page-locked (CUDA error {error}): "
                "lower it, or free memory"
            )
        pages.address = place
        return pages

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # CUDA may be gone when the process ends
                _cuda_runtime().cudaHostUnregister(self.address)


def pin(tensor: Tensor) -> Tensor:
    """Copy a tensor to page-locked memory of the host; what is on no GPU is only copied."""
    if not tensor.is_cuda:
        return tensor.clone()
    pages = PinnedPages.lock(tensor.nbytes)
    host = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


class MappedMemory:
    """Page-locked memory of the host, described as a GPU's, at whose addresses it lies too."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # which lives as long as what is made of this
        data = host.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (host.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def map_to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return pinned memory as a tensor of the device: kernels read it over the bus, and only what they ask for."""
    if device.type != "cuda":
        return host
    mapped = torch.as_tensor(MappedMemory(host), device=torch.device("cuda", torch.cuda.current_device()))
    if mapped.data_ptr() != host.data_ptr():
        raise InvalidConfig("cpu_offload_gb needs a GPU that reads the host's memory in place: leave it out")
    return mapped.view(host.dtype).view(host.shape)
