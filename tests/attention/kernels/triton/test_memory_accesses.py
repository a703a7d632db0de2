# SPDX-License-Identifier: Apache-2.0
"""Every address that our kernels touch, in Triton's interpreter, on ragged cases.

Found are accesses outside of a launch's tensors; two programs of a launch of which one writes what
the other reads or writes, other than by atomics; and values that a program loads or overwrites
after it stored them with no barrier between. Not judged are races through shared memory, which the
compiler alone lays out, a barrier that some threads do not reach, and the order of a load before a
store to the same place, which the data decide.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention.cases import SELECTORS, drawn, inputs_of, ranked, saved
from torch import Tensor

from sparsebalance_megatron.attention.kernels import triton as implementation
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import selector_named

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("the interpreter tells addresses, a GPU does not", allow_module_level=True)

from triton.runtime import interpreter  # noqa: E402

from sparsebalance_megatron.attention.kernels.triton import (  # noqa: E402
    device_functions,
    index,
    token_kernels,
)
from sparsebalance_megatron.attention.select import router_kernels  # noqa: E402

NOBODY, MANY = -1, -2


class _Argument:
    """A tensor of a launch: which programs wrote and read each element, and since which barrier."""

    def __init__(self, x: Tensor) -> None:
        self.begin, self.size = x.data_ptr(), x.element_size()
        elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        self.end = self.begin + (elements if x.numel() else 0) * self.size
        self.writer, self.reader = (np.full(elements, NOBODY) for _ in range(2))
        self.written_at = np.full(elements, -1)


class _Accesses:
    """What the programs of one launch touch."""

    def __init__(self) -> None:
        self.arguments: list[_Argument] = []
        self.program, self.barriers = 0, 0
        self.launches = 0

    def begin(self, arguments: list[Any]) -> None:
        found = {x.data_ptr(): _Argument(x) for x in arguments if isinstance(x, Tensor)}
        self.arguments, self.program = list(found.values()), 0
        self.launches += 1

    def touch(self, pointers: Any, mask: Any, *, kind: str) -> None:
        addresses = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))
        left = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)].astype(np.int64)
        for argument in self.arguments:
            inside = (left >= argument.begin) & (left < argument.end)
            self._note(argument, (left[inside] - argument.begin) // argument.size, kind)
            left = left[~inside]
        assert not left.size, f"{kind} outside of all tensors"

    def _note(self, argument: _Argument, places: Any, kind: str) -> None:
        if kind == "atomic":
            return
        others = argument.writer[places]
        assert np.isin(others, (NOBODY, self.program)).all(), f"{kind} of another program's value"
        mine = (others == self.program) & (argument.written_at[places] == self.barriers)
        assert not mine.any(), f"{kind} of a value stored since the last barrier"
        readers = argument.reader[places]
        if kind == "store":
            assert np.isin(readers, (NOBODY, self.program)).all(), "store to what others read"
            assert len(np.unique(places)) == len(places), "two lanes store to one place"
            argument.writer[places] = self.program
            argument.written_at[places] = self.barriers
        else:
            alone = np.isin(readers, (NOBODY, self.program))
            argument.reader[places] = np.where(alone, self.program, MANY)


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Accesses]:
    """Watches every launch."""
    found, builder = _Accesses(), interpreter.InterpreterBuilder
    set_grid, copied = builder.set_grid_idx, interpreter.GridExecutor._init_args_hst

    def watch(name: str, kind: str, pointers_at: int, mask_at: int) -> None:
        """Note what an operation touches by its arguments at two places."""
        operation = getattr(builder, name)

        def watched(self: Any, *given: Any) -> Any:
            found.touch(given[pointers_at].data, given[mask_at].data, kind=kind)
            return operation(self, *given)

        monkeypatch.setattr(builder, name, watched)

    def next_program(self: Any, *place: int) -> None:
        found.program += 1
        found.barriers = 0
        set_grid(self, *place)

    def arguments(self: Any, given: Any, keywords: Any) -> Any:
        copies = copied(self, given, keywords)
        found.begin([*copies[0], *copies[1].values()])
        return copies

    def barrier(self: Any) -> None:
        found.barriers += 1

    watch("create_masked_load", "load", 0, 1)
    watch("create_masked_store", "store", 0, 2)
    watch("create_atomic_rmw", "atomic", 1, 3)
    monkeypatch.setattr(builder, "set_grid_idx", next_program)
    monkeypatch.setattr(builder, "create_barrier", barrier)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", arguments)
    # Several programs, launches and tiles of everything, at sizes that the interpreter can take.
    monkeypatch.setattr(index, "FEWEST_TILE_READERS", 16)
    monkeypatch.setattr(token_kernels, "WANTED_PROGRAMS", 1000)
    monkeypatch.setattr(token_kernels, "PARTIAL_BYTES", 3 << 12)
    monkeypatch.setattr(device_functions, "WANTED_PROGRAMS", 1000)
    monkeypatch.setattr(router_kernels, "PROGRAMS", 3)
    yield found
    assert found.launches


def _layer(selection: str, lengths: list[int], head_dim: int) -> None:
    layout = packed_layout(lengths, 16, "cpu")
    q, k, v, dout = drawn(lengths[-1], 4, 2, 2, 4, head_dim=head_dim)
    router = "triton" if hasattr(SELECTORS[selection], "with_router") else "auto"
    selector = selector_named(selection, router)
    ranking = ranked(selector, [q, k], layout, max_budget=3, observe=True)
    selector.coverage(ranking)
    selected = selector.select(ranking, torch.full((layout.documents,), 3))
    out, lse = implementation.forward(inputs_of(q, k, v, selected))
    implementation.backward(dout, saved(q, k, v, out, lse, selected))


@pytest.mark.parametrize(
    ("lengths", "head_dim"), [([0, 83], 16), ([0, 1, 20, 36, 90], 20)], ids=["one", "several"]
)
@pytest.mark.parametrize("selection", sorted(SELECTORS))
@pytest.mark.usefixtures("accesses")
def test_programs_stay_in_their_tensors_and_meet_nowhere(
    selection: str, lengths: list[int], head_dim: int
) -> None:
    _layer(selection, lengths, head_dim)


@pytest.mark.usefixtures("accesses")
def test_missing_barriers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_barrier", lambda _: None)
    with pytest.raises(Exception, match="since the last barrier"):
        _layer("token-query-head", [0, 83], 16)
