# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance profile``: measure a model's parts on this machine and write a cost table."""

import argparse
import os
from functools import partial
from pathlib import Path

from sparsebalance_megatron.cli.output import check_writable, write_text
from sparsebalance_megatron.config import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a model's layers on this machine and write a cost table for "
        "--sparse-balance-cost-table. Everything after -- is what training gets: Megatron's flags "
        "and --sparse-balance-*. Started by torchrun on 2, 4, ... ranks, it also measures what it "
        "takes that so many share a sequence."
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="TABLE.json", help="file to write"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer lengths and repeats, for small models and tests"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also report how well rows are predicted that the fit has not seen",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="host threads of a training rank (OMP_NUM_THREADS; torchrun's default is 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.passed_on:
        raise ConfigError("profile: give training's flags after --, at least the model's")
    cores = os.cpu_count() or 1
    if not 1 <= arguments.threads <= cores:
        raise ConfigError(f"--threads {arguments.threads}: must be 1 to {cores}, this host's cores")
    check_writable(arguments.output)
    # Torch and Megatron take seconds, which neither --help nor a wrong flag should cost.
    import torch
    from numpy import quantile
    from tqdm import tqdm

    from sparsebalance_megatron.cost.exchange import gigabytes_per_second
    from sparsebalance_megatron.cost.fit import fit_cost_model, fit_errors, held_out_errors
    from sparsebalance_megatron.profile.cells import FULL, QUICK
    from sparsebalance_megatron.profile.profile import profile

    torch.set_num_threads(arguments.threads)
    table = profile(
        arguments.passed_on,
        thoroughness=QUICK if arguments.quick else FULL,
        threads=arguments.threads,
        progress=partial(tqdm, desc="profile", unit="cell", disable=None),
    )
    if table is None:  # the first rank has it
        return 0
    write_text(arguments.output, table.text())
    print(f"{arguments.output}: {len(table.rows)} measurements")
    model = fit_cost_model(table)
    if table.exchanges:
        received = gigabytes_per_second(model.exchange.ms_per_byte)
        for width, slowness in model.exchange.cp_size_slowness:
            each = f"{received / slowness:.3g} GB/s"
            print(f"sequences shared by {width} ranks: each receives {each}")
    reports = {"the fitted cost model": fit_errors(model, table)}
    if arguments.check:
        reports["the cost model on rows left out of the fit"] = held_out_errors(table)
    for what, errors in reports.items():
        print(f"relative error of {what}:")
        for (part, direction), of_rows in errors.items():
            median, p95 = quantile(of_rows, [0.5, 0.95])
            print(
                f"  {part:<10} {direction:<9} median {median:6.1%}  p95 {p95:6.1%}  "
                f"of {len(of_rows)} rows"
            )
    return 0
