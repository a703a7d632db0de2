# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU over gloo: every replaced symbol, with its reason, in one place.

Megatron asks CUDA for devices, streams, events and generators even where no kernel needs them.
:func:`install` answers for a machine without a GPU, before ``megatron`` is imported. This file
imports nothing of this package, so that it can be loaded by itself.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup
from torch.overrides import TorchFunctionMode

MEGATRON_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "num_workers": 0,
}
"""Argument defaults for a CPU run: each names a CUDA kernel, NCCL, or a pinned-memory worker."""

_CUDA_TYPE_PREFIX = "torch.cuda."
_INSTALLED = "_sparse_balance_cpu"
"""Attribute of ``torch.cuda`` that says so: this file may be loaded more than once."""


class CpuAdapterError(RuntimeError):
    """The adapter cannot be installed here."""


class _CpuForCuda(TorchFunctionMode):
    """Maps CUDA devices, ``.cuda()`` and ``.to("cuda")`` to the CPU, and tensor type strings back:
    Megatron's optimizers recognise their own parameters by ``torch.cuda.FloatTensor``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and args and _is_cuda(args[0]):
            return torch.device("cpu")
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", _CUDA_TYPE_PREFIX, 1)
        if kwargs.get("pin_memory"):
            # Rotary embeddings under context parallelism; pinning would start CUDA.
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _is_cuda(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class _Event:
    """A CUDA event on the host clock."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        return None

    synchronize = wait


class _Stream(nullcontext[None]):
    """A CUDA stream on which everything has already happened."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(None)

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self, other: Any = None) -> None:
        return None

    wait_stream = wait_event = synchronize


class _DeviceProperties:
    """Fields of ``torch.cuda.get_device_properties`` that Megatron reads."""

    name = "cpu"
    major = 8
    minor = 0
    multi_processor_count = 1
    total_memory = 1 << 34


class _CpuMesh:
    """Makes device meshes of the CPU, whatever device they are asked for."""

    @staticmethod
    def from_group(group: ProcessGroup, device_type: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu")


def _returning(value: Any) -> Callable[..., Any]:
    """A new function for every symbol: TorchDynamo refuses one function under two names."""

    def answer(*arguments: Any, **keywords: Any) -> Any:
        return value

    return answer


def _cuda_replacements() -> dict[str, tuple[Any, str]]:
    """Attribute of ``torch.cuda`` -> (replacement, its caller)."""
    return {
        "is_available": (_returning(True), "initialize_megatron asserts CUDA"),
        "device_count": (_returning(1), "initialize_megatron picks the local device"),
        "set_device": (_returning(None), "initialize_megatron"),
        "current_device": (_returning(torch.device("cpu")), "DDP buffers, p2p receives, RoPE"),
        "synchronize": (_returning(None), "p2p with variable lengths, timers, checkpoint writer"),
        "empty_cache": (_returning(None), "checkpoint loading"),
        "get_rng_state": (_get_rng_state, "checkpoint RNG state"),
        "set_rng_state": (_set_rng_state, "checkpoint RNG state"),
        "manual_seed": (lambda seed: torch.manual_seed(seed), "model-parallel seeds"),
        "memory_allocated": (_returning(0), "memory report"),
        "max_memory_allocated": (_returning(0), "memory report"),
        "memory_reserved": (_returning(0), "memory report"),
        "max_memory_reserved": (_returning(0), "memory report"),
        "memory_stats": (_returning({}), "memory report"),
        "reset_peak_memory_stats": (_returning(None), "memory report"),
        "get_device_capability": (_returning((8, 0)), "kernel selection"),
        "get_device_name": (_returning("cpu"), "reports"),
        "get_device_properties": (_returning(_DeviceProperties), "kernel selection"),
        "is_current_stream_capturing": (_returning(False), "torch.optim, which asks the driver"),
        "Event": (_Event, "schedules and DDP"),
        "Stream": (_Stream, "get_model, DDP"),
        "current_stream": (_Stream, "DDP start_grad_sync"),
        "default_stream": (_Stream, "DDP"),
        "stream": (lambda stream: stream, "DDP side streams"),
    }


def _get_rng_state(*arguments: Any, **keywords: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
    torch.set_rng_state(state)


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return getattr(torch.cuda, _INSTALLED, False)


def install() -> None:
    """Replace the symbols listed above; idempotent. Refuses where a CUDA device is visible."""
    if installed():
        return
    if torch.cuda.is_available():
        raise CpuAdapterError(
            "--sparse-balance-device cpu: a CUDA device is visible; hide it with "
            "CUDA_VISIBLE_DEVICES= or use --sparse-balance-device auto"
        )
    for name, (replacement, _) in _cuda_replacements().items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nvtx.range_push = _returning(None)
    torch.cuda.nvtx.range_pop = _returning(None)
    # DataLoader pins memory where an accelerator exists, and pinning would start CUDA.
    torch.accelerator.is_available = _returning(False)
    # Megatron's jit warm-up would compile its fused functions for CUDA.
    from torch import _dynamo

    _dynamo.config.disable = True
    _CpuForCuda().__enter__()
    _replace_in_megatron()
    setattr(torch.cuda, _INSTALLED, True)


def _replace_in_megatron() -> None:
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.distributed.torch_fully_sharded_data_parallel as sharded
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # These two reach into torch.cuda.default_generators, which do not exist.
    for name, replacement in (("_get", _get_rng_state), ("_set", _set_rng_state)):
        name += "_cuda_rng_state"
        setattr(megatron_random, name, wraps(getattr(megatron_random, name))(replacement))
    # Runs ``make``, although the wheel ships the built extension without sources.
    dataset_utils.compile_helpers = _returning(None)

    def host_copy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The mesh of ranks that hold a parameter's shards is made for CUDA devices.
    sharded.DeviceMesh = _CpuMesh
    # Expert counts become numpy arrays only if they are on a GPU, and ``all_to_all_single`` takes
    # split sizes as numpy arrays and refuses tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = host_copy
