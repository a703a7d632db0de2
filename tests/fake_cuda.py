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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsebalance_megatron.attention.device import copied_to

CUDA = torch.device("cuda:0")
HOPPER = (9, 0)
ALIGNMENT_BYTES = 16
"""What kernels are compiled for; a pointer that lies otherwise compiles one anew."""
_COPIES = {"aten::_to_copy", "aten::copy_"}
_WITHOUT_LAUNCH = {
    *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"),
    *("prim::device", "aten::lift_fresh", "aten::promote_types"),
}


class FakeCuda(FakeTensorMode):
    """Fake tensors whose CUDA never looks for a driver, whatever ``torch.cuda`` answers."""

    avoid_device_init = True


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
    """Bytes of storages on a device that live at once; ``most`` of them so far.

    Args:
        before: whose tensors do not count.
    """

    def __init__(self, device: str = "cuda", before: Iterable[Any] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._device = device
        self._seen = {x.untyped_storage()._cdata for x in before if isinstance(x, Tensor)}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        results = function(*arguments, **(keywords or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.device.type == self._device:
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
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A context in which tensors on ``CUDA`` are fake, and nothing is pinned."""
    # Deterministic mode fills what is empty, which is a launch.
    torch.use_deterministic_algorithms(False)
    with pytest.MonkeyPatch.context() as patch, FakeCuda(allow_non_fake_inputs=True) as mode:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
        # What a launcher enters so that its kernel runs where its tensors lie.
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
        patch.setattr(Tensor, "pin_memory", lambda host: host)
        yield mode


def run_backward(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    accumulated: Mapping[Tensor, Callable[[], None]],
) -> None:
    """Accumulate gradients in leaves; ``accumulated`` has what is called when a leaf's has come."""
    edges = [get_gradient_edge(tensor) for tensor in tensors]
    awaited = _uses([edge.node for edge in edges])
    found: dict[Node, dict[int, Tensor]] = {}
    for edge, tensor, gradient in zip(edges, tensors, gradients, strict=True):
        given = torch.ones_like(tensor) if gradient is None else gradient
        _add(found, edge.node, edge.output_nr, given)
    ready = [node for node in dict.fromkeys(edge.node for edge in edges) if not awaited[node]]
    while ready:
        node = ready.pop()
        results = _applied(node, found.pop(node, {}))
        if (leaf := getattr(node, "variable", None)) is not None and leaf in accumulated:
            accumulated[leaf]()
        for (following, place), gradient in zip(node.next_functions, results, strict=False):
            if following is None:
                continue
            if gradient is not None:
                _add(found, following, place, gradient)
            awaited[following] -= 1
            if not awaited[following]:
                ready.append(following)


def _uses(roots: Sequence[Node]) -> Counter[Node]:
    """How many nodes hand a gradient to each node."""
    uses: Counter[Node] = Counter()
    seen, left = set(roots), list(roots)
    while left:
        for following, _ in left.pop().next_functions:
            if following is not None:
                uses[following] += 1
                if following not in seen:
                    seen.add(following)
                    left.append(following)
    return uses


def _add(found: dict[Node, dict[int, Tensor]], node: Any, place: int, gradient: Tensor) -> None:
    """Add a gradient, in the form that the node's output has."""
    form = node._input_metadata[place]
    assert gradient.device == form.device, f"{node.name()}: {gradient.device}, not {form.device}"
    gradient = gradient.sum_to_size(form.shape).to(form.dtype)
    inputs = found.setdefault(node, {})
    inputs[place] = inputs[place] + gradient if place in inputs else gradient


@torch.no_grad()
def _applied(node: Any, inputs: Mapping[int, Tensor]) -> Sequence[Tensor | None]:
    """What a node hands on, one for each of its next functions."""
    forms = node._input_metadata
    if not inputs:
        return [None] * len(node.next_functions)
    if callable(node):
        results = node(*(inputs.get(place) for place in range(len(forms))))
        return results if isinstance(results, tuple) else (results,)
    # A function of Python, which takes zeros for what is not there, and results for all arguments.
    given = [
        inputs[place]
        if place in inputs
        else torch.zeros(form.shape, dtype=form.dtype, device=form.device)
        for place, form in enumerate(forms)
    ]
    results = node.apply(*given)
    results = results if isinstance(results, tuple) else (results,)
    wanted = iter([x for x, need in zip(results, node.needs_input_grad, strict=False) if need])
    return [None if following is None else next(wanted) for following, _ in node.next_functions]
