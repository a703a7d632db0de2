# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance sensitivity``: find the layers that need many blocks, before training."""

import argparse
from pathlib import Path
from statistics import correlation

from sparsebalance_megatron.cli.output import check_writable, write_text
from sparsebalance_megatron.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read some training samples with dense attention, and write how sensitive each layer is, "
        "for --sparse-balance-sensitivity. Everything after -- is what training gets, --load with "
        "the weights included; start it by torchrun as training is."
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
    parser.add_argument(
        "--check",
        action="store_true",
        help="also cut one layer at a time to the least budget, and print what copied tokens lose",
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.passed_on:
        raise ConfigError("sensitivity: give training's flags after --")
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: must be at least 1")
    check_writable(arguments.output)
    # Torch and Megatron take seconds, which neither --help nor a wrong flag should cost.
    from sparsebalance_megatron.run.sensitivity import measure_sensitivities

    found = measure_sensitivities(
        arguments.passed_on, samples=arguments.samples, check=arguments.check
    )
    if found is None:  # the first rank has it
        return 0
    write_text(arguments.output, found.text())
    greatest = max(found.sensitivities)
    print(f"{arguments.output}: {found.measure}, of {found.samples} samples")
    for layer, sensitivity in enumerate(found.sensitivities):
        bar = "#" * round(40 * sensitivity / greatest)
        cut = f"{found.cuts[layer]:+8.4f} nats " if found.cuts else ""
        print(f"layer {layer:3} {sensitivity:7.4f} {cut}{bar}")
    if arguments.check and not found.cuts:
        print("not checked: no sample repeats three tokens more than a block away")
    if found.cuts:
        print("nats: lost by a copied token where that layer alone is cut")
    if min(len(set(found.sensitivities)), len(set(found.cuts))) > 1:
        rank = correlation(found.sensitivities, found.cuts, method="ranked")
        print(f"rank correlation of sensitivities and cuts: {rank:.2f}")
    return 0
