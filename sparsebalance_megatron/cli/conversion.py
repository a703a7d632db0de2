# SPDX-License-Identifier: Apache-2.0
"""What ``sparse-balance convert`` does once its flags are read; loads torch and Megatron."""

from __future__ import annotations

import argparse
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import torch

from sparsebalance_megatron.cli.output import OutputError, progress_bar
from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.convert.dense_model import DenseModel
from sparsebalance_megatron.convert.hf_config import DTYPES, read_config
from sparsebalance_megatron.convert.mapping import OUTPUT, parameters
from sparsebalance_megatron.convert.megatron_flags import bash_array, model_flags
from sparsebalance_megatron.convert.transfer import TransferCounts, plan_weights, read_weights
from sparsebalance_megatron.convert.weight_files import WeightFiles, copy_companions, write_weights
from sparsebalance_megatron.errors import ConvertError

FLAGS_FILE = "model_args.sh"
"""Beside the checkpoint: the flags that build its model, as a bash array to source."""


def check_output(output: Path) -> None:
    """Raise unless ``output`` is a new or empty directory.

    Raises:
        ConfigError, OutputError: it is something else, or cannot be looked at.
    """
    try:
        unusable = output.is_symlink() and not output.exists()
        if unusable or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
            raise ConfigError(f"--output {output}: not an empty directory; choose another")
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from error


@contextmanager
def _whole_directory(output: Path) -> Iterator[Path]:
    """A folder to write into, whose contents move to ``output`` once nothing has failed.

    Raises:
        OutputError: if something cannot be written; ``output`` is as before then.
    """
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


def print_flags(arguments: argparse.Namespace) -> None:
    """Print the Megatron flags of a Hugging Face directory's model, as a bash array."""
    model = read_config(arguments.hf_dir)
    _install_cpu_adapter()
    from sparsebalance_megatron.convert.megatron_model import parse_model_flags

    with redirect_stdout(io.StringIO()):
        args = parse_model_flags(model, arguments.passed_on, dtype=model.dtype or torch.float32)
    print(_model_args(model, args), end="")


def from_hf_to_megatron(arguments: argparse.Namespace) -> None:
    """Write a Megatron checkpoint from a Hugging Face directory; print counts and flags."""
    model = read_config(arguments.hf_dir)
    with WeightFiles(arguments.hf_dir) as files:
        files.check_matches(parameters(model), spare=(OUTPUT,) if model.tied else ())
        _install_cpu_adapter()
        from sparsebalance_megatron.megatron.saved_model import save_release

        args, megatron_model = _built(model, arguments.passed_on, files.common_dtype())
        targets = dict(megatron_model.named_parameters())
        progress = partial(progress_bar, command="convert", unit="parameter", extra="data")
        counts = read_weights(files, targets, model, progress)
    flags = _model_args(model, args)
    with _whole_directory(arguments.output) as unfinished:
        with redirect_stdout(io.StringIO()):
            save_release(args, megatron_model, unfinished)
        (unfinished / FLAGS_FILE).write_text(flags, encoding="utf-8")
    print(f"{arguments.output}: {_describe(counts, args.params_dtype)}")
    print(f"vocabulary: {model.vocab_size} rows, {counts.padding_rows} more of zeros as padding")
    print(f"flags of the model, also in {arguments.output / FLAGS_FILE}:\n{flags}", end="")


def from_megatron_to_hf(arguments: argparse.Namespace) -> None:
    """Write a Hugging Face directory from a Megatron checkpoint; print counts."""
    model = read_config(arguments.hf_config)
    _install_cpu_adapter()
    from sparsebalance_megatron.megatron.saved_model import SavedModel

    saved = SavedModel(arguments.checkpoint_dir, arguments.iteration)
    padding_rows = saved.vocabulary_rows - model.vocab_size
    if padding_rows < 0:
        raise ConvertError(
            f"{saved.path}: the embedding has {saved.vocabulary_rows} rows, config.json's "
            f"vocab_size is {model.vocab_size}; train with --padded-vocab-size as from-hf prints "
            "it, or lower vocab_size"
        )
    dtype = DTYPES[arguments.dtype] if arguments.dtype else model.dtype or saved.dtype
    flags = ("--padded-vocab-size", str(saved.vocabulary_rows))
    _, megatron_model = _built(model, flags, saved.dtype)
    with redirect_stdout(io.StringIO()):
        values = saved.load(megatron_model)
    plans = plan_weights(values, model, dtype)
    with _whole_directory(arguments.output) as unfinished:
        files = write_weights(unfinished, plans)
        copied = copy_companions(arguments.hf_config, unfinished, dtype)
    counts = TransferCounts(
        tensors=len(plans),
        parameters=len(parameters(model)),
        numbers=sum(plan.bytes for plan in plans) // dtype.itemsize,
        padding_rows=padding_rows,
        cast=len(plans) if dtype != saved.dtype else 0,
        left_out=0,
    )
    print(f"{arguments.output}: {_describe(counts, dtype)}, in {files} file(s)")
    print(f"vocabulary: {model.vocab_size} rows, {padding_rows} rows of padding dropped")
    print(f"copied from {arguments.hf_config}: {', '.join(copied)}")


def _install_cpu_adapter() -> None:
    """A conversion needs no GPU; hiding it leaves one way in which everything runs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from sparsebalance_megatron.megatron import cpu

    cpu.install()


def _built(
    model: DenseModel, flags: Sequence[str], dtype: torch.dtype
) -> tuple[argparse.Namespace, torch.nn.Module]:
    """Megatron's arguments and its model, whose parameters are those of the mapping."""
    from sparsebalance_megatron.convert import megatron_model as building
    from sparsebalance_megatron.megatron.single_process import start_single_process

    with redirect_stdout(io.StringIO()):
        args = building.parse_model_flags(model, flags, dtype=dtype)
        start_single_process(args.seed, torch.device("cpu"))
        megatron_model = building.build_model(args)
    building.check_names(megatron_model, parameters(model))
    return args, megatron_model


def _model_args(model: DenseModel, args: argparse.Namespace) -> str:
    flags = model_flags(
        model,
        divisor=args.make_vocab_size_divisible_by,
        padded_vocab_size=args.padded_vocab_size,
    )
    return bash_array(flags)


def _describe(counts: TransferCounts, dtype: torch.dtype) -> str:
    parts = [
        f"{counts.tensors} tensors of Hugging Face, {counts.parameters} parameters of Megatron",
        f"{counts.numbers:,} numbers of {str(dtype).removeprefix('torch.')}",
    ]
    if counts.cast:
        parts.append(f"{counts.cast} tensors cast")
    if counts.left_out:
        parts.append(f"{counts.left_out} tensors left out that the others determine")
    return ", ".join(parts)
