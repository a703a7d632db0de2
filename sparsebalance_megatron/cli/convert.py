# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance convert``: a Hugging Face directory to a Megatron checkpoint, and back.

One process does it on the CPU, also where a GPU is visible. Both checkpoints are on local disk.
Torch and Megatron take seconds to import, which neither ``--help`` nor a wrong flag should cost.
"""

import argparse
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebalance_megatron.cli import HelpFormatter
from sparsebalance_megatron.cli.output import OutputError
from sparsebalance_megatron.errors import ConfigError, ConvertError
from sparsebalance_megatron.megatron.datasets import quiet_imports

if TYPE_CHECKING:
    import torch

    from sparsebalance_megatron.convert.hf_config import Decoder

FLAGS_FILE = "model_args.sh"
"""Beside the checkpoint: the flags that build its model, as a bash array to source."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn weights of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE on disk into a Megatron "
        "checkpoint that loads at any parallel sizes, and back."
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
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the weights written; default: config.json's",
    )


def run(arguments: argparse.Namespace) -> int:
    import safetensors  # noqa: F401  Before anything else takes its time.

    if arguments.output is not None:
        _check_output(arguments.output)
    to_hf = arguments.direction == "to-hf"
    if to_hf and arguments.passed_on:
        raise ConfigError("convert to-hf takes no flags after --; drop them")
    # Megatron warns of what it misses here, none of which a conversion needs.
    with quiet_imports():
        from sparsebalance_megatron.convert.hf_config import read_config

        model = read_config(arguments.hf_config if to_hf else arguments.hf_dir)
        # A conversion needs no GPU; hiding it leaves one way in which everything runs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
        if to_hf:
            _from_megatron_to_hf(arguments, model)
        elif arguments.print_flags:
            _print_flags(arguments, model)
        else:
            _from_hf_to_megatron(arguments, model)
    return 0


def _check_output(output: Path) -> None:
    unusable = output.is_symlink() and not output.exists()
    if unusable or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise ConfigError(f"--output {output}: not an empty directory; choose another")


@contextmanager
def _whole_directory(output: Path) -> Iterator[Path]:
    """A folder to write into, whose contents move to ``output`` once nothing has failed; if
    something cannot be written, ``output`` is as before."""
    existed = output.exists()
    unfinished = output / f".partial-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in sorted(unfinished.iterdir()):
            path.rename(output / path.name)
    except OSError as error:
        raise OutputError(f"--output {output}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not existed and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def _print_flags(arguments: argparse.Namespace, model: "Decoder") -> None:
    import torch

    from sparsebalance_megatron.convert.megatron_model import model_arrays, parse_model_flags

    dtype = model.weights_dtype or torch.float32
    args = parse_model_flags(model, arguments.passed_on, dtype=dtype)
    print(model_arrays(model, args, arguments.hf_dir), end="")


def _from_hf_to_megatron(arguments: argparse.Namespace, model: "Decoder") -> None:
    """Write a Megatron checkpoint from a Hugging Face directory; print counts and flags."""
    from tqdm import tqdm

    from sparsebalance_megatron.convert.mapping import parameters
    from sparsebalance_megatron.convert.megatron_model import model_arrays
    from sparsebalance_megatron.convert.transfer import WeightFiles, read_weights
    from sparsebalance_megatron.megatron.saved_model import save_release

    with WeightFiles(arguments.hf_dir) as files:
        files.check_matches(model)
        args, megatron_model = _built(model, arguments.passed_on, files.common_dtype())
        targets = dict(megatron_model.named_parameters())
        mapped = tqdm(parameters(model), desc="convert", unit="parameter", disable=None)
        counts = read_weights(files, targets, model, mapped)
    flags = model_arrays(model, args, arguments.hf_dir)
    with _whole_directory(arguments.output) as unfinished:
        with redirect_stdout(io.StringIO()):
            save_release(args, megatron_model, unfinished)
        (unfinished / FLAGS_FILE).write_text(flags, encoding="utf-8")
    print(f"{arguments.output}: {counts.describe(args.params_dtype)}")
    print(f"vocabulary: {model.vocab_size} rows, {counts.padding_rows} more of zeros as padding")
    print(f"flags of the model, also in {arguments.output / FLAGS_FILE}:\n{flags}", end="")


def _from_megatron_to_hf(arguments: argparse.Namespace, model: "Decoder") -> None:
    import torch

    from sparsebalance_megatron.convert import megatron_model as of_megatron
    from sparsebalance_megatron.convert.transfer import copy_companions, write_weights
    from sparsebalance_megatron.megatron.saved_model import SavedModel

    saved = SavedModel(arguments.checkpoint_dir, arguments.iteration)
    if saved.vocabulary_rows < model.vocab_size:
        raise ConvertError(
            f"{saved.path}: the embedding has {saved.vocabulary_rows} rows, config.json's "
            f"vocab_size is {model.vocab_size}; train with --padded-vocab-size as from-hf prints "
            "it, or lower vocab_size"
        )
    asked = getattr(torch, arguments.dtype) if arguments.dtype else None
    dtype: torch.dtype = asked or model.weights_dtype or saved.dtype
    flags = ("--padded-vocab-size", str(saved.vocabulary_rows))
    args, megatron_model = _built(model, flags, saved.dtype)
    with redirect_stdout(io.StringIO()):
        values = saved.load(megatron_model)
    settings = None
    # A release, which from-hf writes, was not trained: config.json stays as it is.
    own_keys: dict[str, Any] = {}
    if saved.arguments is not None:
        of_megatron.check_trained(saved.arguments, args)
        settings = of_megatron.trained_settings(saved.arguments)
        if saved.path.name != "release":
            own_keys = of_megatron.config_keys(settings)
    if settings is not None:
        # What would be replaced must be what training can follow, as in from-hf.
        of_megatron.read_settings(arguments.hf_config, model)
    with _whole_directory(arguments.output) as unfinished:
        counts = write_weights(unfinished, values, model, dtype)
        copied = copy_companions(arguments.hf_config, unfinished, dtype, own_keys)
    print(f"{arguments.output}: {counts.describe(dtype)}")
    print(f"vocabulary: {model.vocab_size} rows, {counts.padding_rows} rows of padding dropped")
    print(f"copied from {arguments.hf_config}: {', '.join(copied)}")
    if saved.arguments is None:
        print("the checkpoint keeps no arguments, so its settings were not compared to config.json")
    if settings is not None:
        print("config.json has the attention of training in sparse_attention_config")


def _built(
    model: "Decoder", flags: Sequence[str], dtype: "torch.dtype"
) -> "tuple[argparse.Namespace, torch.nn.Module]":
    import torch

    from sparsebalance_megatron.convert.megatron_model import build_model, parse_model_flags
    from sparsebalance_megatron.megatron.single_process import start_single_process

    args = parse_model_flags(model, flags, dtype=dtype)
    start_single_process(args.seed, torch.device("cpu"))
    return args, build_model(model, args)
