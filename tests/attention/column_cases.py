# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention whose selection has single columns, and what they let a query read.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, N blocks, K
places of a list.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import torch
from attention.cases import SCALE, Case, make_case
from oracles import attention as attention_oracle
from oracles import vertical_slash as oracle
from torch import Tensor

from sparsebalance_megatron.attention.selection import ColumnLists


class ColumnCase(Case):
    """A case whose masks come from the definition, and from the lists, columns included."""

    @functools.cached_property
    def mask_HTT(self) -> Tensor:
        layout = self.selection.query_layout
        ranked = oracle.ranked(
            *(self.q_THD, self.k_TGD, list(layout.cu_seqlens), layout.block_size, SCALE),
            looks_ahead=self.granularity == "vertical-slash-last-queries",
        )
        choices = {
            (row, head): oracle.cut(
                order,
                self.budgets[int(layout.document_N[row])],
                list(layout.cu_seqlens),
                layout.block_size,
            )
            for (row, head), order in ranked.items()
        }
        return self._mask_of(choices)

    def exact(self) -> tuple[Tensor, ...]:
        """Masked dense attention in float64, under the mask of the definition."""
        return self.run(
            lambda q, k, v: attention_oracle.plain_attention(q, k, v, self.mask_HTT, SCALE),
            torch.float64,
        )

    @functools.cached_property
    def listed_HTT(self) -> Tensor:
        selection, columns = self.selection, self.selection.columns

        def listed(lists: Tensor, counts: Tensor, row: int, head: int) -> list[int]:
            return lists[row, head, : int(counts[row, head])].tolist()

        rows, heads = selection.counts_QC.shape
        return self._mask_of(
            {
                place: oracle.Choice(
                    blocks=listed(selection.indices_QCK, selection.counts_QC, *place),
                    columns=listed(columns.tokens_NGK, columns.counts_NG, *place)
                    if columns
                    else [],
                )
                for place in itertools.product(range(rows), range(heads))
            }
        )

    def _mask_of(self, choices: dict[tuple[int, int], oracle.Choice]) -> Tensor:
        layout = self.selection.query_layout
        return oracle.mask(choices, self.q_THD.shape[1], list(layout.cu_seqlens), layout.block_size)


def make_column_case(
    cu_seqlens: list[int],
    budgets: list[int],
    *,
    granularity: str = "vertical-slash",
    **options: Any,
) -> ColumnCase:
    """See :func:`.cases.make_case`."""
    case = make_case(cu_seqlens, budgets, granularity=granularity, **options)
    return ColumnCase(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})


def any_case(
    cu_seqlens: list[int], budgets: list[int], *, granularity: str, **options: Any
) -> Case:
    """A case of any selection; see :func:`.cases.make_case`."""
    make = make_column_case if granularity.startswith("vertical-slash") else make_case
    return make(cu_seqlens, budgets, granularity=granularity, **options)


def with_columns(case: ColumnCase, tokens_NGK: Tensor, counts_NG: Tensor) -> ColumnCase:
    columns = ColumnLists(tokens_NGK=tokens_NGK, counts_NG=counts_NG)
    selection = dataclasses.replace(case.selection, columns=columns)
    return dataclasses.replace(case, selection=selection)


def with_random_columns(case: ColumnCase, most: int) -> ColumnCase:
    """Past tokens in any order: ``most`` and a third of that in turn, where there are so many; past
    the end of a list no token's number."""
    generator, lists = random.Random(most), case.selection
    layout, (rows, heads, _) = lists.kv_layout, lists.indices_QCK.shape
    tokens_NGK = torch.full((rows, heads, most), 1 << 30, dtype=torch.int32)
    counts_NG = torch.zeros(rows, heads, dtype=torch.int32)
    for row in range(rows):
        first = layout.cu_seqlens[int(layout.document_N[row])]
        past = range(first, int(layout.start_N[row]))
        for head in range(heads):
            read = set(lists.indices_QCK[row, head, : int(lists.counts_QC[row, head])].tolist())
            left = [token for token in past if int(layout.block_T[token]) not in read]
            length = most if (row + head) % 2 else most // 3
            chosen = generator.sample(left, min(length, len(left)))
            tokens_NGK[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            counts_NG[row, head] = len(chosen)
    return with_columns(case, tokens_NGK, counts_NG)
