# SPDX-License-Identifier: Apache-2.0
"""The results as a table in text."""

from collections.abc import Mapping
from typing import Any

from end_to_end.variants import ALL_VARIANTS, DENSE, EXACT, FIXED
from sparsebalance_megatron.text_table import text_table

_LABELS = {variant.name: variant.label for variant in ALL_VARIANTS}


def print_layout(name: str, found: Mapping[str, Any]) -> None:
    """One row per variant."""
    print(f"\n{name}: {found['title']}; {found['batches']} global batches of each variant")
    rows = [_row(variant, summary) for variant, summary in found["variants"].items()]
    print(*text_table(rows), sep="\n")
    heaviest = next(iter(found["variants"].values()))["heaviest_over_mean"]
    if heaviest is not None:
        least, mean = heaviest
        print(f"  heaviest micro-batch over the mean: {least:.2f} at least, {mean:.2f} on average")


def _row(name: str, summary: Mapping[str, Any]) -> dict[str, str]:
    low, high = summary["quartiles_ms"]
    fixed, dense, exact = (
        summary.get(f"versus_{reference}") for reference in (FIXED, DENSE, EXACT)
    )
    covered = (
        "all"
        if summary["coverage"] is None
        else f"{summary['coverage']:.3f} ({summary['base_coverage']:.3f})"
    )
    return {
        "": _LABELS[name],
        "median ms": f"{summary['median_ms']:.0f}",
        "quartiles": f"{low:.0f} - {high:.0f}",
        "x fixed": f"{fixed['speedup']:.3f}" if fixed else "-",
        "95 %": "{:.3f} - {:.3f}".format(*fixed["interval"]) if fixed else "-",
        "median x": f"{fixed['median_ratio']:.3f}" if fixed else "-",
        "x dense": f"{dense['speedup']:.2f}" if dense else "-",
        "x exact": f"{exact['speedup']:.2f}" if exact else "-",
        "over bound": f"{summary['over_bound']:.3f}" if "over_bound" in summary else "-",
        "imbalance": "-" if summary["imbalance"] is None else f"{summary['imbalance']:.3f}",
        "waiting": "-" if summary["waiting"] is None else f"{summary['waiting']:.1%}",
        "coverage (base)": covered,
        "work": "-" if summary["work_ratio"] is None else f"{summary['work_ratio']:.3f}",
        "loss": f"{summary['lm_loss']:.3f}",
    }
