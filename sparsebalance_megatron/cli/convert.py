# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance convert``: a Hugging Face directory to a Megatron checkpoint, and back.

One process does it on the CPU, also where a GPU is visible. Both checkpoints are on local disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsebalance_megatron.cli.help_formatter import HelpFormatter
from sparsebalance_megatron.config import ConfigError

DTYPE_NAMES = ("float32", "float16", "bfloat16")
"""Those of :data:`sparsebalance_megatron.convert.hf_config.DTYPES`, which loads torch."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``convert``."""
    parser.description = (
        "Turn dense Llama, Mistral and Qwen2 weights on disk into a Megatron "
        "checkpoint that loads at any tensor- and pipeline-parallel size, and back."
    )
    directions = parser.add_subparsers(dest="direction", metavar="from-hf | to-hf", required=True)
    from_hf = directions.add_parser(
        "from-hf",
        formatter_class=HelpFormatter,
        help="Hugging Face to Megatron",
        description="Write a torch_dist checkpoint and print the Megatron flags of its model. "
        "What follows -- is for Megatron, such as --make-vocab-size-divisible-by or --bf16.",
        usage="sparse-balance convert from-hf HF_DIR (--output CHECKPOINT_DIR | --print-flags) "
        "[-- <Megatron flags>]",
    )
    from_hf.add_argument("hf_dir", type=Path, metavar="HF_DIR", help="config.json and safetensors")
    action = from_hf.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "-o", "--output", type=Path, metavar="CHECKPOINT_DIR", help="new or empty directory"
    )
    action.add_argument(
        "--print-flags", action="store_true", help="only print the flags, as a bash array"
    )
    to_hf = directions.add_parser(
        "to-hf",
        formatter_class=HelpFormatter,
        help="Megatron to Hugging Face",
        description="Write safetensors and config.json from a torch_dist checkpoint that training "
        "or from-hf wrote, at whatever parallel sizes.",
    )
    to_hf.add_argument(
        "checkpoint_dir", type=Path, metavar="CHECKPOINT_DIR", help="what --save named"
    )
    to_hf.add_argument(
        "-o", "--output", required=True, type=Path, metavar="HF_DIR", help="new or empty directory"
    )
    to_hf.add_argument(
        "--hf-config",
        required=True,
        type=Path,
        metavar="HF_DIR",
        help="directory with the model's config.json; tokenizer files in it are copied too",
    )
    to_hf.add_argument("--iteration", type=int, metavar="N", help="default: the latest")
    to_hf.add_argument(
        "--dtype", choices=DTYPE_NAMES, help="of the weights written; default: config.json's"
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print counts.

    Raises:
        ConvertError: if the model is not supported, or tensors are missing, unknown or of another
            shape; nothing is written then.
        ConfigError: if the flags do not fit.
        OutputError: if the output cannot be written.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "convert needs safetensors: pip install 'sparsebalance-megatron[data]'"
        ) from error
    # Torch takes seconds, which neither --help nor a wrong flag should cost.
    from sparsebalance_megatron.cli import conversion

    if arguments.output is not None:
        conversion.check_output(arguments.output)
    if arguments.direction == "to-hf":
        if arguments.passed_on:
            raise ConfigError("convert to-hf takes no flags after --; drop them")
        conversion.from_megatron_to_hf(arguments)
    elif arguments.print_flags:
        conversion.print_flags(arguments)
    else:
        conversion.from_hf_to_megatron(arguments)
    return 0
