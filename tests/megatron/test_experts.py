# SPDX-License-Identifier: Apache-2.0
"""What a recorder hears of a token dispatcher's collectives, forward and backward."""

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from sparsebalance_megatron.megatron.experts import COLLECTIVES_PER_LAYER, watch_expert_collectives


class Dispatcher:
    """One rank's, which exchanges tokens by doubling them, and passes ``alone`` through."""

    def preprocess(self, tokens: Tensor) -> int:
        return len(tokens)

    def token_dispatch(self, tokens: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        return tokens * 2.0, alone

    def token_combine(self, tokens: Tensor) -> Tensor:
        return tokens * 3.0


class Layer(BaseMoELayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.token_dispatcher = Dispatcher()

    def forward(self, tokens: Tensor) -> Tensor:
        self.token_dispatcher.preprocess(tokens)
        sent, alone = self.token_dispatcher.token_dispatch(tokens, tokens.square())
        return self.token_dispatcher.token_combine(sent.exp() + alone)


class Heard(list[tuple[str, int]]):
    def begin_collective(self, number: int) -> None:
        self.append(("begin", number))

    def end_collective(self, number: int) -> None:
        self.append(("end", number))


def gradient(model: torch.nn.Module) -> Tensor:
    tokens = torch.linspace(-1.0, 1.0, 5, requires_grad=True)
    model(tokens).sum().backward()
    assert tokens.grad is not None
    return tokens.grad


def test_collectives_are_heard_in_order_and_change_nothing() -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.Tanh(), Layer())
    expected = gradient(model)
    heard, later = Heard(), Heard()
    for _ in range(2):
        watch_expert_collectives(model, heard)
    assert torch.equal(gradient(model), expected)
    forward = [*range(2 * COLLECTIVES_PER_LAYER)]
    backward = [number for number in reversed(forward) if number % COLLECTIVES_PER_LAYER]
    assert heard == [(what, x) for x in forward + backward for what in ("begin", "end")]

    with torch.no_grad():
        model(torch.ones(3))
    assert heard[len(forward + backward) * 2 :] == heard[: len(forward) * 2]

    watch_expert_collectives(model, later)
    count = len(heard)
    gradient(model)
    assert len(heard) == count
    assert len(later) == 2 * len(forward + backward)
