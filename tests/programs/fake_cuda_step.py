# SPDX-License-Identifier: Apache-2.0
"""Megatron's training loop runs one step of one rank on fake CUDA tensors; no GPU is needed.

    fake_cuda_step.py RESULT RANKS CAPABILITIES FLAGS...

trains as one of RANKS data-parallel ranks, on a process group that sends nothing, and writes to
RESULT: what the host waited for, what was copied, by whom, and what Triton launched. Its launches
are compiled for each of CAPABILITIES (as ``90,100``). Everything outside of the model and the step
runs on the CPU, by the CPU adapter.
"""

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULT, RANKS, CAPABILITIES = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
del sys.argv[1:4]
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
os.environ |= {"RANK": "0", "WORLD_SIZE": RANKS, "LOCAL_RANK": "0"}

from sparsebalance_megatron.megatron import cpu  # noqa: E402

cpu.install()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import triton  # noqa: E402
from drawn_segments import plan_with_drawn_segments  # noqa: E402
from fake_cuda import FakeCuda, Launches, TritonLaunch, fake_cuda  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402
from megatron.core.optimizer import optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.training import training  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import MockTensor  # noqa: E402

from sparsebalance_megatron import integration, pretrain_gpt  # noqa: E402
from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.run import trainer  # noqa: E402

setattr(torch.cuda, cpu._INSTALLED, False)
MODE = FakeCuda(allow_non_fake_inputs=True)
WAITS: Counter[str] = Counter()
"""How often the host waited for the device, by who asked."""


def owner() -> str:
    """The innermost function of Megatron or this package that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("sparsebalance_megatron.", "megatron.")):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


def count_wait(*_: Any) -> None:
    """``synchronize`` of the device, a stream or an event."""
    WAITS[owner()] += 1


class Watch(TorchDispatchMode):
    """Counts waits and copies by who asks; a number that is waited for is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        name = function._schema.name
        if name == "aten::_local_scalar_dense" and arguments[0].device.type == "cuda":
            count_wait()
            return 1.0
        result = function(*arguments, **keywords)
        if name in ("aten::_to_copy", "aten::copy_"):
            source = arguments[1] if name == "aten::copy_" else arguments[0]
            if source.device != result.device and source.ndim:
                self.copies[f"to {result.device.type}: {owner()}"] += 1
        return result


def compiled_for(capability: int, launches: Iterable[TritonLaunch]) -> dict[str, int]:
    """Compile what was launched; compiled kernels by name."""

    class Driver:
        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    triton.runtime.driver.set_active(Driver())
    compiled: dict[str, set[str]] = {}
    for launch in launches:
        types = [x.dtype if isinstance(x, Tensor) else x for x in launch.arguments]
        # Triton takes dtypes for tensors among the positional arguments alone.
        named = {
            name: MockTensor(value.dtype) if isinstance(value, Tensor) else value
            for name, value in launch.keywords.items()
        }
        found = launch.kernel.warmup(*types, grid=(1,), **named)
        compiled.setdefault(launch.name, set()).add(found.hash)
    return {name: len(hashes) for name, hashes in sorted(compiled.items())}


def moved(module: Any, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``Module._apply``, which cannot exchange a fake tensor for another."""
    for child in module.children():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            data = change(parameter.data)
            if (data.dtype, data.device) != (parameter.dtype, parameter.device):
                new = torch.nn.Parameter(data, parameter.requires_grad)
                for attribute, value in parameter.__dict__.items():
                    new.__dict__.setdefault(attribute, value)
                module._parameters[name] = new
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def of_ones(x: Tensor, real: Callable[..., Any] = Tensor.numpy, **how: Any) -> Any:
    """``Tensor.numpy``; of a fake tensor, ones."""
    if isinstance(x, FakeTensor):
        return np.ones(tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
    return real(x, **how)


def cuda_type(x: Tensor, *to: Any, real: Callable[..., Any] = Tensor.type) -> Any:
    """``Tensor.type``, whose names Megatron's optimizers compare."""
    return real(x, *to) if to else f"torch.cuda.{real(x).rpartition('.')[2]}"


@contextlib.contextmanager
def on_cuda() -> Iterator[None]:
    """The CPU adapter's answers are put aside, and tensors are fake."""
    with pytest.MonkeyPatch.context() as patch, torch._C.DisableTorchFunction(), fake_cuda(MODE):
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "synchronize", count_wait)
        yield


def build(*arguments: Any, inner: Any = training.setup_model_and_optimizer, **keywords: Any) -> Any:
    with on_cuda():
        return inner(*arguments, **keywords)


def one_step(*arguments: Any, inner: Any = training.train_step, **keywords: Any) -> None:
    watch, launches = Watch(), Launches()
    WAITS.clear()
    with on_cuda(), watch, launches.of_triton():
        inner(*arguments, **keywords)
    capabilities = [each for each in CAPABILITIES.split(",") if each]
    found = {
        "waits": WAITS,
        "copies": watch.copies,
        "launches": Counter(launch.name for launch in launches.by_triton),
        "compiled": {each: compiled_for(int(each), launches.by_triton) for each in capabilities},
    }
    RESULT.write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    init, new_group = dist.init_process_group, dist.new_group

    def fake_world(**how: Any) -> None:
        init("fake", store=FakeStore(), rank=how["rank"], world_size=how["world_size"])

    def same_everywhere(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    def hooks(args: Any, inner: Any = integration.training_hooks) -> Any:
        # The device is not to become the CPU.
        with torch._C.DisableTorchFunction():
            return inner(args)

    dist.init_process_group = fake_world
    dist.new_group = lambda *ranks, **how: new_group(*ranks, **how | {"backend": "fake"})
    dist.all_gather_object = same_everywhere
    dist.batch_isend_irecv = lambda operations: []
    step_planner.plan_step = plan_with_drawn_segments
    # The process group has no coalesced reduction of fake tensors.
    waited = SimpleNamespace(wait=lambda: None)
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext(waited)
    # Without apex, Megatron puts the norms of all gradients into a list of the host.
    optimizer.get_grad_norm_fp32 = lambda *_, **__: 1.0
    cpu._Event.synchronize = cpu._Stream.synchronize = count_wait
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    integration.training_hooks = hooks
    trainer.check_kernels = lambda *_, **__: "kernels are not run"
    torch.backends.cuda.is_flash_attention_available = lambda: True
    training.setup_model_and_optimizer = functools.wraps(build)(build)
    training.train_step = one_step
    torch.nn.Module._apply = moved
    Tensor.numpy, Tensor.type = of_ones, cuda_type
    Tensor.record_stream = lambda *_: None
    pretrain_gpt._train("cuda")


if __name__ == "__main__":
    main()
