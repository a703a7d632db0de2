# SPDX-License-Identifier: Apache-2.0
"""Autograd's engine in Python, for fake CUDA tensors: torch's own asks the driver for streams.

The graph and its formulas are torch's; only the walk is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


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
