# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance sensitivity``: find the layers that need many blocks, before training."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsebalance_megatron.cli.output import check_writable, write_text
from sparsebalance_megatron.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read some training samples with dense attention, and write how sensitive each layer is, "
        "for --sparse-balance-sensitivity. Everything after -- is what training gets, --load with "
        "the weights included; start it by torchrun as training is."
    )
    parser.usage = (
        "sparse-balance sensitivity -o SENSITIVITY.json [--samples N] -- <flags of training>"
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="SENSITIVITY.json", help="file to write"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=8,
        help="training samples to read; whole evaluation batches are",
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.passed_on:
        raise ConfigError("sensitivity: give training's flags after --")
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: must be at least 1")
    check_writable(arguments.output)
    # Torch and Megatron take seconds, which neither --help nor a wrong flag should cost.
    from sparsebalance_megatron.run.sensitivity import measure_sensitivities

    found = measure_sensitivities(arguments.passed_on, samples=arguments.samples)
    if found is None:  # the first rank has it
        return 0
    write_text(arguments.output, found.text())
    greatest = max(found.sensitivities)
    print(f"{arguments.output}: {found.measure}, of {found.samples} samples")
    for layer, sensitivity in enumerate(found.sensitivities):
        bar = "#" * round(40 * sensitivity / greatest)
        print(f"layer {layer:3} {sensitivity:7.4f} {bar}")
    return 0
