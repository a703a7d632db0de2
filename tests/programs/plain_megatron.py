# SPDX-License-Identifier: Apache-2.0
"""Megatron's training loop on mock data in a process that never imports the plugin.

The CPU adapter is loaded from its file alone. Rows are read on tensor-parallel rank 0 and broadcast
by Megatron, as upstream's own script does.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

ADAPTER = Path(__file__).parents[2] / "sparsebalance_megatron" / "megatron" / "cpu.py"
specification = importlib.util.spec_from_file_location("cpu_adapter", ADAPTER)
adapter = importlib.util.module_from_spec(specification)
specification.loader.exec_module(adapter)
adapter.install()

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.global_vars import get_tokenizer  # noqa: E402


def datasets(sample_counts, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, sample_counts, lambda: True, config
    ).build()


datasets.is_distributed = True


def loss_function(mask, output):
    loss = (output.view(-1).float() * mask.view(-1)).sum()
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    row = next(data_iterator)
    output = model(row["tokens"], row["position_ids"], row["attention_mask"], labels=row["labels"])
    return output, partial(loss_function, row["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=lambda parser: (
            parser.set_defaults(**adapter.MEGATRON_DEFAULTS) or parser
        )
    )
    assert not any(name.startswith("sparsebalance_megatron") for name in sys.modules)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )
    assert not any(name.startswith("sparsebalance_megatron") for name in sys.modules)
