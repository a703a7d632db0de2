# SPDX-License-Identifier: Apache-2.0
"""An exchange that counts the bytes of an existing one, in a group of one rank."""

import numpy as np
import torch
import torch.distributed as dist

from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.sequence.between_ranks import AllGatherExchange
from sparsebalance_megatron.attention.sequence.exchange import rank_slice, sequence_attention
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice


class CountingExchange(AllGatherExchange):
    """Counts the bytes of keys and values that attention reads."""

    read_bytes = 0

    def parts(self, k_TGD, v_TGF, selection, sequence):
        for part in super().parts(k_TGD, v_TGF, selection, sequence):
            k_part_TGD, v_part_TGF, _ = part
            self.read_bytes += k_part_TGD.nbytes + v_part_TGF.nbytes
            yield part


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
exchange = CountingExchange(dist.group.WORLD)
sequence = SequenceSlice(
    cu_seqlens=(0, 100, 300),
    block_size=16,
    owner_N=np.zeros(7 + 13, dtype=int),  # the rank that holds each block
    group=SequenceGroup(member=0, members=1),
    device="cpu",
)
q, k, v = (torch.randn(300, heads, 32) for heads in (4, 2, 2))
selector, scale = selector_named("token-query-head"), 32**-0.5
ranking = rank_slice(
    selector, q, k, sequence, softmax_scale=scale, max_budget=4, observe=False, exchange=exchange
)
selection = selector.select(ranking, torch.tensor([4, 4], dtype=torch.int32))
out, lse = sequence_attention(q, k, v, selection, sequence, exchange=exchange, softmax_scale=scale)
print(exchange.read_bytes)  # 2 tensors x 300 tokens x 2 heads x 32 x 4 bytes
dist.destroy_process_group()
