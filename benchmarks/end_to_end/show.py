# SPDX-License-Identifier: Apache-2.0
"""The results as a table in text."""

from collections.abc import Mapping
from typing import Any

from end_to_end.variants import ALL_VARIANTS, DENSE, EXACT, FIXED

_LABELS = {variant.name: variant.label for variant in ALL_VARIANTS}


def print_layout(name: str, found: Mapping[str, Any]) -> None:
    """One row per variant."""
    print(f"\n{name}: {found['title']}; {found['batches']} global batches of each variant")
    rows: list[tuple[str, ...]] = [
        (
            *("", "median ms", "quartiles", "x fixed", "95 %", "median x"),
            *(
                "x dense",
                "x exact",
                "over bound",
                "imbalance",
                "waiting",
                "coverage (base)",
                "work",
            ),
            "loss",
        )
    ]
    rows += [_row(variant, summary) for variant, summary in found["variants"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    heaviest = next(iter(found["variants"].values()))["heaviest_over_mean"]
    if heaviest is not None:
        least, mean = heaviest
        print(f"  heaviest micro-batch over the mean: {least:.2f} at least, {mean:.2f} on average")


def _row(name: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = summary["quartiles_ms"]
    fixed, dense, exact = (
        summary.get(f"versus_{reference}") for reference in (FIXED, DENSE, EXACT)
    )
    covered = (
        "all"
        if summary["coverage"] is None
        else f"{summary['coverage']:.3f} ({summary['base_coverage']:.3f})"
    )
    return (
        _LABELS[name],
        f"{summary['median_ms']:.0f}",
        f"{low:.0f} - {high:.0f}",
        f"{fixed['speedup']:.3f}" if fixed else "-",
        "{:.3f} - {:.3f}".format(*fixed["interval"]) if fixed else "-",
        f"{fixed['median_ratio']:.3f}" if fixed else "-",
        f"{dense['speedup']:.2f}" if dense else "-",
        f"{exact['speedup']:.2f}" if exact else "-",
        f"{summary['over_bound']:.3f}" if "over_bound" in summary else "-",
        "-" if summary["imbalance"] is None else f"{summary['imbalance']:.3f}",
        "-" if summary["waiting"] is None else f"{summary['waiting']:.1%}",
        covered,
        "-" if summary["work_ratio"] is None else f"{summary['work_ratio']:.3f}",
        f"{summary['lm_loss']:.3f}",
    )
