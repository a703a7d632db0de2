# SPDX-License-Identifier: Apache-2.0
"""The results as a table in text and as one figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from end_to_end.variants import ALL_VARIANTS, DENSE, EXACT, FIXED

_LABELS = {variant.name: variant.label for variant in ALL_VARIANTS}
_INCHES_PER_ROW = 0.36
_TICKS = (0.25, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)


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
                "shared",
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
        f"{summary['shared_micro_batches']:.2f}",
        f"{summary['lm_loss']:.3f}",
    )


def draw(layouts: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Step time of every variant relative to the fixed budget's; one panel per layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(found["variants"]) for found in layouts.values())
    figure = Figure(
        figsize=(1.8 + 4.4 * len(layouts), 1.5 + rows * _INCHES_PER_ROW), layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0]
    for axis, found in zip(panels, layouts.values(), strict=True):
        _draw_layout(axis, found)
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_layout(axis: Any, found: Mapping[str, Any]) -> None:
    variants = found["variants"]
    base_ms = variants[FIXED]["total_ms"]
    bound = 1.0 / variants[FIXED]["over_bound"]
    axis.axvline(1.0, color="0.6", linewidth=1)
    axis.axvline(bound, color="tab:green", linestyle="--", linewidth=1.2)
    axis.text(bound, -0.75, "perfect balance", color="tab:green", fontsize=8, ha="center")
    drawn = [1.0, bound]
    for place, (name, summary) in enumerate(variants.items()):
        time = summary["total_ms"] / base_ms
        slow, fast = (1.0 / speedup for speedup in summary[f"versus_{FIXED}"]["interval"])
        drawn += [slow, fast]
        colour = "tab:red" if name == DENSE else "tab:blue"
        axis.plot([fast, slow], [place, place], color=colour, linewidth=5, alpha=0.35)
        axis.plot(time, place, "o", color=colour, markersize=5)
        axis.annotate(
            f"{time:.2f}",
            (slow, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _finish_axis(axis, found, limits=(min(drawn) * 0.9, max(drawn) * 1.2))


def _finish_axis(axis: Any, found: Mapping[str, Any], *, limits: tuple[float, float]) -> None:
    low, high = limits
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    shown = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()
    labels = [_LABELS[name] for name in found["variants"]]
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(-1.1, len(labels) - 0.4)
    axis.set_title(found["title"].replace("; ", ";\n"), loc="left", fontsize=9)
    axis.set_xlabel("step time, fixed budget = 1 (total; band: 95 % bootstrap)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
