# SPDX-License-Identifier: Apache-2.0
"""Megatron's FLOP count sees every sequence once, however many ranks share it."""

from types import SimpleNamespace

import pytest
import torch

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron import hooks
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.run.forward_step import ForwardStep

CU_SEQLENS = torch.tensor([0, 3, 10], dtype=torch.int32)


def micro_batch(
    member: int | None, segment_count: int = 1, segment: int = 0, padding_documents: int = 0
) -> LocalMicroBatch:
    """A micro-batch of a run that shares no sequences, or one member's part of a shared one."""
    ranks, sequence = SimpleNamespace(member=member), None
    if segment_count > 1:
        sequence = SimpleNamespace(ranks=ranks, segment=segment)
    elif member is not None:
        sequence = SimpleNamespace(ranks=None, group=ranks)
    segments = SimpleNamespace(count=segment_count) if segment_count > 1 else None
    return LocalMicroBatch(
        **{"layout": None, "budgets_LS": None, "max_budgets": (), "observe": False},  # not read
        sequence=sequence,
        segment=segment,
        segments=segments,
        padding_documents=padding_documents,
    )


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tokens that Megatron's count was fed with, call by call."""
    training = pytest.importorskip("megatron.training.training")
    tokens: list[float] = []
    monkeypatch.setattr(
        training,
        "update_seqlen_stats_from_cu_seqlens",
        lambda cu_seqlens: tokens.append(float(cu_seqlens.diff().sum())),
    )
    return tokens


@pytest.mark.parametrize(
    ("member", "context_ranks", "changes", "counted"),
    [
        *(
            (None, 1, {}, 10.0),
            (0, 1, {}, 10.0),
            (1, 1, {}, 0.0),
            (0, 4, {}, 40.0),
            (3, 4, {}, 0.0),
        ),
        # Of sequences of 3 and 7 tokens the second is padding.
        (None, 1, {"padding_documents": 1}, 3.0),
        # Of several segments the last one counts, on the first member.
        *(
            (member, 1, {"segment_count": 3, "segment": each}, 10.0 * (each == 2 and not member))
            for each in range(3)
            for member in range(2)
        ),
    ],
)
def test_a_sequence_is_counted_as_often_as_megatron_divides(
    monkeypatch: pytest.MonkeyPatch,
    fed: list[float],
    member: int | None,
    context_ranks: int,
    changes: dict[str, int],
    counted: float,
) -> None:
    """Every rank feeds something, or it would leave out the collective that adds up."""
    monkeypatch.setattr(
        hooks.parallel_state, "get_context_parallel_world_size", lambda: context_ranks
    )
    hooks.count_sequences(CU_SEQLENS, micro_batch(member, **changes))
    assert fed == ([counted / context_ranks] * context_ranks if counted else [0.0])


def reported(loss: torch.Tensor, tokens: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a run keeps of a training micro-batch whose loss function returns these."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    run = SimpleNamespace(add_loss=lambda loss, tokens, report: kept.append((loss, tokens)))
    inputs = SimpleNamespace(settings=SimpleNamespace(seq_length=256))
    step = ForwardStep(None, SimpleNamespace(run=run, inputs=inputs))  # type: ignore[arg-type]
    step._loss(lambda output: (loss, tokens, {}), True, loss)
    return kept


@pytest.mark.parametrize("tokens", [0, 7, torch.tensor(7), torch.tensor(7, dtype=torch.int64)])
def test_a_loss_function_may_count_tokens_in_whole_numbers(tokens: int | torch.Tensor) -> None:
    ((loss, count),) = reported(torch.tensor(3.0, requires_grad=True), tokens)
    assert not loss.requires_grad
    assert count.double() == float(tokens)


def test_a_count_of_tokens_that_megatron_cannot_add_up_is_named() -> None:
    with pytest.raises(ConfigError, match=r"torch.float64 as the number of tokens"):
        reported(torch.tensor(3.0), torch.tensor(7.0, dtype=torch.float64))
