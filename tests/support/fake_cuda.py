# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors without a GPU: they have a device, a shape and a dtype, and no numbers.

An operation on tensors of two devices is refused, and so is one whose result the host must wait
for: ``item``, ``nonzero``, a boolean index, ``repeat_interleave``. Kernels of Triton are not run;
what they are given is looked at.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsebalance_megatron.attention.device import copied_to

CUDA, META = torch.device("cuda:0"), torch.device("meta")
HOPPER = (9, 0)
ALIGNMENT_BYTES = 16
"""What kernels are compiled for; a pointer that lies otherwise compiles one anew."""
_COPIES = {"aten::_to_copy", "aten::copy_"}
_WITHOUT_LAUNCH = {
    *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"),
    *("prim::device", "aten::lift_fresh", "aten::promote_types"),
}


class FakeCuda(FakeTensorMode):
    """Fake tensors whose CUDA never looks for a driver, whatever ``torch.cuda`` answers.

    Autograd's engine asks a tensor for its device to find a stream. It is told ``meta``, which has
    none; what it then makes on ``meta`` lies on CUDA.
    """

    avoid_device_init = True

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and args[0].fake_device.type == "cuda":
            return META
        if kwargs and kwargs.get("device") == META:
            # Not CUDA, which the CPU adapter may have replaced.
            kwargs = kwargs | {"device": torch.device("cuda", 0)}
        return super().dispatch(func, types, args, kwargs)


# Else torch asks for the device as autograd's engine does.
FakeTensor.is_cuda = property(lambda x: x.device.type == "cuda")


def _by_copied_to() -> bool:
    """Whether the caller was called by :func:`.device.copied_to`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not copied_to.__code__:
        frame = frame.f_back
    return frame is not None


class NoTraffic(TorchDispatchMode):
    """Refuses copies between the host and the device, but for :func:`.device.copied_to`."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function._schema.name in _COPIES:
            source = arguments[1] if function._schema.name == "aten::copy_" else arguments[0]
            # A number of the host that fills a tensor travels as an argument of the kernel.
            if source.device != result.device and source.ndim and not _by_copied_to():
                raise AssertionError(f"{source.shape} goes from {source.device} to {result.device}")
        return result


class TritonLaunch(NamedTuple):
    """A kernel with what it was given."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.keywords

    def check(self) -> None:
        """Tensors lie on the device, begin where the kernel expects it, and have dense last
        dimensions."""
        begin_anywhere = {
            each.name for each in self.kernel.params if each.do_not_specialize_on_alignment
        }
        for argument, value in self.named.items():
            if isinstance(value, Tensor):
                what = f"{self.name}: {argument}"
                assert str(value.device) == "cuda:0", f"{what} lies on {value.device}"
                offset = value.storage_offset() * value.element_size()
                if argument not in begin_anywhere:
                    assert offset % ALIGNMENT_BYTES == 0, f"{what} begins at byte {offset}"
                assert value.ndim == 0 or value.stride(-1) == 1 or value.shape[-1] == 1, (
                    f"{what} has strides {value.stride()}"
                )


class Launches(TorchDispatchMode):
    """Counts operations of torch that are no views and no allocations, and Triton's launches.

    Attributes:
        counted: launches by name.
        by_triton: every launch of Triton.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.by_triton: list[TritonLaunch] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        aliases = [value.alias_info for value in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and function._schema.name not in _WITHOUT_LAUNCH:
            self.counted[function._schema.name] += 1
        return function(*arguments, **(keywords or {}))

    @contextlib.contextmanager
    def of_triton(self) -> Iterator[None]:
        """Kernels of Triton are counted, checked and not run."""
        import triton

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
            launch = TritonLaunch(kernel, arguments, keywords)
            launch.check()
            self.counted[launch.name] += 1
            self.by_triton.append(launch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.runtime.JITFunction, "run", run)
            yield


class PeakMemory(TorchDispatchMode):
    """Bytes of storages on CUDA that live at once; ``most`` of them so far.

    Args:
        before: whose tensors do not count.
    """

    def __init__(self, before: Iterable[Any] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {x.untyped_storage()._cdata for x in before if isinstance(x, Tensor)}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        results = function(*arguments, **(keywords or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.device.type == "cuda":
                storage = result.untyped_storage()
                if storage._cdata not in self._seen and storage.nbytes():
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return results

    def _gone(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.now -= size


@contextlib.contextmanager
def fake_cuda(mode: FakeCuda | None = None) -> Iterator[FakeTensorMode]:
    """A context in which tensors on ``CUDA`` are fake, those of ``mode`` or new ones, and nothing
    is pinned."""
    # Deterministic mode fills what is empty, which is a launch.
    torch.use_deterministic_algorithms(False)
    mode = mode or FakeCuda(allow_non_fake_inputs=True)
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
        # What a launcher enters so that its kernel runs where its tensors lie.
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
        patch.setattr(Tensor, "pin_memory", lambda host: host)
        yield mode
