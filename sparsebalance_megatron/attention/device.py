# SPDX-License-Identifier: Apache-2.0
"""Copies from the host to a device, and products there in the precision of their operands."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_ALIGNED_BYTES = 16


def copied_to(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on ``device``, without a wait for what runs there.

    CUDA copies from pageable memory while the host waits, so the tensor is pinned first. No ring of
    buffers is needed: torch keeps freed pinned blocks by power of two, and hands one out again when
    a query of its event, which is no wait, says that the copy has ended (CachingHostAllocator.h).
    """
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def aligned(x_THD: Tensor) -> Tensor:
    """The tensor itself where each of its vectors begins at a multiple of 16 bytes, else a copy."""
    *strides, last = x_THD.stride()
    places = (x_THD.storage_offset(), *strides)
    fits = last == 1 and not any(x * x_THD.element_size() % _ALIGNED_BYTES for x in places)
    return x_THD if fits else x_THD.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """A context in which ``torch.autocast`` changes no dtype and no torch function mode sees calls.

    A mode, such as the one that lets Megatron run without a GPU, costs as much as an operation on a
    small block does.
    """
    with torch.autocast(device.type, enabled=False), torch._C.DisableTorchFunction():
        yield


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of float32 operands, all of whose 24 bits count; float32.

    Where CUDA takes TF32 operands, of 11 bits, the product is taken in float64 instead. That TF32
    is on is a setting of the whole process, which cannot be changed for one call without changing
    it for other threads.
    """
    if a.device.type == "cuda" and _tf32_is_on():
        return (a.double() @ b.double()).float()
    return a @ b


def _tf32_is_on() -> bool:
    matmul = torch.backends.cuda.matmul
    # The older name raises where the newer one was set.
    return getattr(matmul, "fp32_precision", "") == "tf32" or (
        not hasattr(matmul, "fp32_precision") and matmul.allow_tf32
    )
