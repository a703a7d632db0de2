# SPDX-License-Identifier: Apache-2.0
"""Training step times of dense, fixed-budget and balanced attention, in Megatron's own loop.

One model trains under all variants in turn: consecutive steps run the same global batch under
every variant, in an order that changes from batch to batch, so that what disturbs the machine
disturbs all, and times can be compared in pairs. A variant plans from its own past steps only.

``dp2`` and ``pp2`` run two processes over gloo, one thread each: they need two idle cores. In
``dp2-shared`` both may share a micro-batch in one variant, in ``dp2-window`` samples change places
within four steps; there totals of four batches are compared. In
``pp2-deep-2`` and ``pp2-deep-4`` pipelines of eight layers have that many micro-batches, which one
variant may run in segments. In ``ep2`` two ranks exchange tokens of experts in every layer, in
``fsdp2`` they gather its weights, so that each waits for the other there. In ``gpu-dp4`` one device
plays four data-parallel ranks in turn: every micro-batch is timed for real, a step is the slowest
rank's computation plus what all ranks share, and nothing is communicated. Flags after -- go to
Megatron, last, so that they win over the benchmark's.

Documents are the sources of Python's standard library, up to --seq-length tokens; --directory
keeps them, the cost table and all logs.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from end_to_end import launch, show
from end_to_end.evaluation import FORMULAS, bounds_ms, summarise
from end_to_end.layouts import LAYOUTS, Layout, model_flags
from end_to_end.results import read_steps
from end_to_end.variants import (
    ALL_VARIANTS,
    EXACT_SHARED,
    EXACT_WINDOW,
    FIXED,
    IN_LOCKSTEP,
    OURS_SEGMENTS,
    VARIANTS,
    WARM_UP_BATCHES,
    WITH_SEGMENTS,
    WITH_SHARED,
    WITH_WINDOWS,
    StepOrder,
)

BUSY_LOAD = 0.5
QUICK = {"batches": 4, "warm_up": 2, "seq_length": 2048}
QUICK_WINDOWS = QUICK | {"warm_up": 4}
SEQ_LENGTH = {"cpu": 8192, "cuda": 32768}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(list(sys.argv[1:] if argv is None else argv))
    load_at_start = os.getloadavg()[0]
    if load_at_start > BUSY_LOAD:
        print(f"the machine is not idle: load {load_at_start:.2f}; times will be blurred")
    try:
        layouts = measure(options)
    except launch.BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = {
        "benchmark": "end_to_end",
        "quick": options.quick,
        "machine": machine(options.device) | {"load_at_start": load_at_start},
        "formulas": FORMULAS,
        "layouts": layouts,
    }
    for name, layout in layouts.items():
        show.print_layout(name, layout)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with ``megatron_flags`` from after --. Exits on wrong usage."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=("both", *LAYOUTS), default="both")
    parser.add_argument("--batches", type=int, help="measured global batches (default: 30)")
    parser.add_argument("--warm-up", type=int, help=f"before those (default: {WARM_UP_BATCHES})")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="end training after that time, and show the batches until then. Default: no limit",
    )
    parser.add_argument("--seq-length", type=int, help="tokens (default: 8192; on a GPU 32768)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[variant.name for variant in ALL_VARIANTS],
        help="default: those that the layout is for",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: as the layout says")
    parser.add_argument("--data", type=Path, help="prefix of .bin and .idx; default: made once")
    parser.add_argument("--directory", type=Path, default=Path("runs/end_to_end"))
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--quick", action="store_true", help="a few short steps, to see that it works"
    )
    options = parser.parse_args(argv[:split])
    options.megatron_flags = argv[split + 1 :]
    options.device = options.device or ("cuda" if options.layout == "gpu-dp4" else "cpu")
    layout = LAYOUTS.get(options.layout, LAYOUTS["dp2"])
    if options.variants is None:
        options.variants = list(usual_variants(layout))
    seq_length = layout.seq_length or SEQ_LENGTH[options.device]
    usual = {
        "batches": 32 if layout.windows else 30,
        "warm_up": WARM_UP_BATCHES,
        "seq_length": seq_length,
    }
    quick = QUICK_WINDOWS if layout.windows else QUICK
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and options.layout != "gpu-dp4":
        parser.error(f"--device cuda: only --layout gpu-dp4 runs on a GPU, not {options.layout}")
    if OURS_SEGMENTS in options.variants and not layout.segments:
        parser.error(f"--variants {OURS_SEGMENTS}: only --layout pp2-deep-2 and -4 have it")
    if EXACT_SHARED in options.variants and not layout.shared:
        parser.error(f"--variants {EXACT_SHARED}: only --layout dp2-shared has it")
    if EXACT_WINDOW in options.variants and not layout.windows:
        parser.error(f"--variants {EXACT_WINDOW}: only --layout dp2-window has it")
    if options.batches < 1 or options.warm_up < 0:
        parser.error("--batches must be at least 1 and --warm-up at least 0")
    return options


def usual_variants(layout: Layout) -> tuple[str, ...]:
    """Names of the variants that a layout is for."""
    if layout.segments:
        return WITH_SEGMENTS
    if layout.shared:
        return WITH_SHARED
    if layout.windows:
        return WITH_WINDOWS
    return IN_LOCKSTEP if layout.lockstep else tuple(variant.name for variant in VARIANTS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare, profile, train and evaluate; results by layout.

    Raises:
        BenchmarkError: if a part fails.
    """
    names = ("dp2", "pp2") if options.layout == "both" else (options.layout,)
    prefix = launch.prepared_data(options.data or options.directory / "data" / "python-stdlib")
    flags = model_flags(device=options.device, seq_length=options.seq_length)
    flags += LAYOUTS[names[0]].model
    tokenizer = launch.tokenizer_flags(prefix, options.megatron_flags)
    data = ["--data-path", str(prefix), *tokenizer]
    first = LAYOUTS[names[0]]
    table = launch.profile(
        [*flags, *data, *first.flags, *options.megatron_flags],
        options.directory / "cost_table.json",
        device=options.device,
        quick=options.quick,
        processes=first.processes if first.shared else 1,
    )
    costs = ["--sparse-balance-cost-table", str(table)]
    return {
        name: measure_layout(
            LAYOUTS[name],
            [*flags, *options.megatron_flags],
            [*data, *costs],
            options,
        )
        for name in names
    }


def measure_layout(
    layout: Layout, flags: Sequence[str], paths: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Train one layout and evaluate it. ``flags`` go into the result, ``paths`` do not."""
    variants = [variant for variant in ALL_VARIANTS if variant.name in options.variants]
    order = StepOrder(len(variants), options.warm_up + options.batches)
    directory = options.directory / layout.name
    print(f"{layout.name}: training {order.steps} steps, logs in {directory}", flush=True)
    began_s = time.perf_counter()
    launch.train(
        layout,
        variants,
        order,
        [*paths, *flags],
        directory=directory,
        device=options.device,
        minutes=options.minutes,
    )
    training_s = time.perf_counter() - began_s
    batches = read_steps(
        directory,
        order,
        variants,
        warm_up=options.warm_up,
        ranks_in_turn=layout.ranks_in_turn,
    )
    window = max(variant.window for variant in variants)
    summaries = summarise(batches, lockstep=layout.lockstep, window=window)
    return {
        "title": layout.title,
        "processes": layout.processes,
        "ranks_in_turn": layout.ranks_in_turn,
        "emulated": layout.ranks_in_turn > 1,
        "seq_length": options.seq_length,
        "batches": len(batches),
        "warm_up_batches": options.warm_up,
        "training_s": round(training_s, 1),
        "tokens": sum(next(iter(batch.values())).tokens for batch in batches),
        "flags": [*layout.flags, *flags],
        "variants": summaries,
        "step_ms": {
            name: [round(batch[name].step_ms, 3) for batch in batches] for name in summaries
        },
        "bound_ms": bounds_ms(batches).round(3).tolist()
        if FIXED in summaries and not layout.lockstep
        else None,
    }


def machine(device: str) -> dict[str, Any]:
    packages = ("torch", "numpy", "megatron-core", "sparsebalance-megatron")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": gpu_name() if device == "cuda" else "cpu",
        "threads_per_process": 1,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "load_at_end": os.getloadavg()[0],
    }


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def cpu_name() -> str:
    """What the kernel calls it; the architecture where it does not say."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text("utf-8").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
