# SPDX-License-Identifier: Apache-2.0
"""The arms: ways to train the same model on the same documents from the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.selector_registry import BUILT_IN, POLICIES, SELECTORS

DENSE, FIXED, PAPER, OURS = "dense", "fixed", "paper", "ours"
RANDOM = "random"
"""Arms that a table cannot do without."""
REPEATED = "fixed-repeated-1", "fixed-repeated-2"
"""Arms that repeat the fixed budget's experiment: one run of it may be lucky."""
KV_HEAD = "-kv-head"
"""How the names of arms end that select per token and KV head."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train. Names of its choices are those of ``SparseBalanceConfig``.

    Attributes:
        dense: whether attention is dense, and lists are read in scoring alone.
        budget_share: of the study's base budget.
        repetition: draws a change of every initial weight by about a thousandth; 0 changes none.
        jitter: whether a few random samples of a step get a block more and as many a block less.
        equal_speed: whether all samples have the study's ``equal_speed_blocks``; the trained model
            is read at the base budget.
        replays: the arm whose executed budgets this one takes, dealt to other samples of the same
            step.
        window: steps within which samples change places, by length or ``at_random``.
        window_share: of a step's samples that are neighbours by length; 1 sorts.
    """

    name: str
    title: str
    selection: str = "token-query-head"
    batching: Batching = "makespan"
    tuning: str = "off"
    coverage_threshold: float = 0.1
    budget_share: float = 1.0
    dense: bool = False
    repetition: int = 0
    jitter: bool = False
    equal_speed: bool = False
    replays: str | None = None
    window: int = 1
    window_share: float = 0.25
    at_random: bool = False

    @property
    def changes_plans(self) -> bool:
        """Whether other budgets are executed than planned."""
        return self.replays is not None or self.jitter or self.equal_speed

    def base_budget(self, study_budget: int) -> int:
        """Blocks."""
        return max(1, round(study_budget * self.budget_share))

    def flags(self, study_budget: int) -> list[str]:
        """Flags of the plugin."""
        prefix = "--sparse-balance"
        return [
            *(f"{prefix}-selection", self.selection, f"{prefix}-batching", self.batching),
            *(f"{prefix}-tuning", self.tuning),
            *(f"{prefix}-coverage-threshold", str(self.coverage_threshold)),
            *(f"{prefix}-base-budget", str(self.base_budget(study_budget))),
        ]


def _balanced(suffix: str, remark: str, selection: str) -> tuple[Arm, ...]:
    """A fixed budget, and three ways to change it, with one selection."""
    ours = f"{OURS}{suffix}"
    return (
        Arm(name=f"{FIXED}{suffix}", title=f"{remark}fixed budget", selection=selection),
        Arm(
            name=f"{PAPER}{suffix}",
            title=f"{remark}the paper: latency batching, tuned to the mean",
            selection=selection,
            batching="latency",
            tuning="anchor",
        ),
        Arm(
            name=ours,
            title=f"{remark}ours: raise what would idle",
            selection=selection,
            tuning="raise",
        ),
        Arm(
            name=f"{RANDOM}{suffix}",
            title=f"{remark}random: the budgets of ours, to other samples of the step",
            selection=selection,
            replays=ours,
        ),
    )


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name=DENSE, title="dense attention", dense=True),
        *_balanced("", "", "token-query-head"),
        *_balanced(KV_HEAD, "a token per KV head selects: ", "token-kv-head"),
        Arm(
            name="fixed-lookahead",
            title="fixed budget, the mean of a query block selects",
            selection="query-block-lookahead",
        ),
        Arm(
            name="fixed-previous-block",
            title="fixed budget, the mean of the block before selects",
            selection="previous-block",
        ),
        Arm(
            name="fixed-first-query",
            title="fixed budget, a block's first query selects",
            selection="first-query",
        ),
        Arm(
            name="fixed-vertical-slash",
            title="fixed budget, columns and diagonals of the block before",
            selection="vertical-slash",
        ),
        *(
            Arm(name=f"fixed-{name}", title=f"fixed budget, {name} selects", selection=name)
            for name in SELECTORS.names()
            if name not in BUILT_IN
        ),
        *(
            Arm(name=name, title=f"budgets by the policy {name}", tuning=name)
            for name in POLICIES.names()
            if name not in POLICIES.built_in
        ),
        Arm(name="fixed-again", title="fixed budget, order of arrival", batching="arrival"),
        *(
            Arm(
                name=name,
                title="fixed budget, initial weights changed by a thousandth",
                repetition=number,
            )
            for number, name in enumerate(REPEATED, 1)
        ),
        Arm(name="jitter", title="fixed budget, four samples moved by a block", jitter=True),
        Arm(
            name="fixed-equal-speed",
            title="fixed budget with the planned step time of ours",
            equal_speed=True,
        ),
        Arm(name="half", title="half the fixed budget", budget_share=0.5),
        *(
            Arm(name=name, title=f"dense attention, {title}", dense=True, window=steps, **others)
            for name, title, steps, others in (
                ("window-4", "a quarter gathered within 4 steps", 4, {}),
                ("window-4-half", "a half gathered within 4 steps", 4, {"window_share": 0.5}),
                ("window-8", "a quarter gathered within 8 steps", 8, {}),
                ("window-4-sorted", "sorted within 4 steps", 4, {"window_share": 1.0}),
                ("window-4-random", "random exchange within 4 steps", 4, {"at_random": True}),
            )
        ),
    )
}
"""Arms by name, in the order in which they run: what every other arm is compared with comes
first."""
USUAL_ARMS = tuple(name for name, arm in ARMS.items() if arm.window == 1)
"""All but those with windows, which ``dense`` is the reference of."""


def references_of(name: str) -> tuple[str, ...]:
    """The arms whose mean another is compared with: the fixed budget, with the same selection if
    there are arms of its own, and its repetitions."""
    if ARMS[name].window > 1:
        return (DENSE,)
    if name.endswith(KV_HEAD) and not name.startswith(FIXED):
        return (f"{FIXED}{KV_HEAD}",)
    return tuple(each for each in (FIXED, *REPEATED) if each != name)


def in_order(names: Sequence[str]) -> list[Arm]:
    """Arms of these names in the order in which they run, with those that they replay.

    Raises:
        ValueError: there is no such arm.
    """
    for name in names:
        if name not in ARMS:
            raise ValueError(f"--arms {name}: must be among {', '.join(ARMS)}")
    needed = {*names, *(ARMS[name].replays for name in names)}
    return [arm for name, arm in ARMS.items() if name in needed]
