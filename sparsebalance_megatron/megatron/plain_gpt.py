# SPDX-License-Identifier: Apache-2.0
"""GPT training as Megatron does it by itself: what runs when ``--sparse-balance`` is off.

The wheel of megatron-core ships the training loop but not ``pretrain_gpt.py``; this is the dataset
provider and the forward step that the loop needs. Every rank reads its own batches, so that nothing
is broadcast between tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.hooks import token_loss

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def dataset_provider(sample_counts: Sequence[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Megatron's train, validation and test datasets for the parsed flags."""
    args = get_args()
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        sample_counts,
        lambda: True,
        _dataset_config(args),
    )
    return tuple(builder.build())


dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def _dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron names some dataset options otherwise than their flags; the rest go by field name."""
    from megatron.training.global_vars import get_tokenizer

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    renamed = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    names = [field.name for field in fields(GPTDatasetConfig) if field.init]
    same = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return GPTDatasetConfig(**(same | renamed))


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Forward of one fixed-length micro-batch."""
    args = get_args()
    if args.sft:
        raise ConfigError("--sft without --sparse-balance: use Megatron's own pretrain_gpt.py")
    batch = next(data_iterator)
    batch = {key: batch[key].cuda(non_blocking=True) for key in _BATCH_KEYS if key in batch}
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(token_loss, batch["loss_mask"], args.check_for_nan_in_loss_and_grad)
