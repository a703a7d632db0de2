# SPDX-License-Identifier: Apache-2.0
"""Selectors that other packages bring: found by name, refused in one line where they are broken."""

import sys
from pathlib import Path

import pytest
import torch
from harness import REPOSITORY
from step_cases import SHAPE

from sparsebalance_megatron.attention.api import budgeted_attention
from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.model import (
    DEFAULT_EFFICIENCY,
    CostModel,
    selection_efficiency,
)
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK, BlockTopK, work_model_named
from sparsebalance_megatron.selector_registry import (
    BUILT_IN,
    SELECTORS,
    load_selector,
    load_work_model,
)

EXAMPLE = REPOSITORY / "examples" / "selectors"
ENTRIES = {
    "quest": "quest:QUEST",
    "absent": "no_such_module:SELECTOR",
    "class": "quest:Quest",
    "halfway": "quest:BlockSummaries.__doc__",
}


def install(folder: Path, name: str, entries: dict[str, str]) -> None:
    """What an installer leaves of a package, as far as entry points go."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}\n" for key, value in entries.items()]
    text = "".join(["[sparsebalance_megatron.selectors]\n", *lines])
    (information / "entry_points.txt").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with the example and packages that are broken."""
    install(tmp_path, "selectors", ENTRIES)
    for folder in (EXAMPLE, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    return tmp_path


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_selection_of_the_package_can_be_loaded(name: str) -> None:
    selector = load_selector(name)
    assert selector.by_token == name.startswith("token")
    assert load_work_model(name).attended_pairs(3, 2) == 5.0


def test_a_selector_is_found_by_its_name(packages: Path) -> None:
    assert {"quest", "absent"} <= set(SELECTORS.names())
    assert SparseBalanceConfig(selection="quest").selection == "quest"
    assert selector_named("quest") is sys.modules["quest"].QUEST
    assert work_model_named("quest") == BlockTopK(per_token=True, per_query_head=False)
    assert SELECTORS.source_of("quest") == "quest = quest:QUEST of selectors 1.0"
    assert SELECTORS.source_of("token-kv-head") == ""
    assert selection_efficiency(work_model_named("quest"), 16) == DEFAULT_EFFICIENCY
    q_THD, k_TGD = torch.randn(50, 4, 8), torch.randn(50, 2, 8)
    how = {"block_size": 16, "softmax_scale": 0.4}
    out, _ = budgeted_attention(q_THD, k_TGD, k_TGD, [0, 50], 2, selection="quest", **how)
    other, _ = budgeted_attention(
        *(q_THD, k_TGD, k_TGD, [0, 50], 2), selection=selector_named("quest"), **how
    )
    assert torch.equal(out, other)


def test_shared_lists_of_another_package_are_counted_as_shared(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates follow from the work, not from a name."""
    monkeypatch.setattr(type(load_selector("quest")), "work_model", QUERY_BLOCK)
    theirs, ours = (
        CostModel.analytic(SHAPE, 256, selection=name) for name in ("quest", "previous-block")
    )
    assert theirs.ms_per_unit == ours.ms_per_unit and theirs.efficiency == ours.efficiency


def test_an_unknown_name_lists_what_exists(packages: Path) -> None:
    with pytest.raises(ConfigError, match=r"token-query-head, .*previous-block, .*quest"):
        SparseBalanceConfig(selection="vertical-slash-last-queries")
    with pytest.raises(ValueError, match=r"token: must be one of token-query-head, .*quest"):
        selector_named("token")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "absent",
            r"--sparse-balance-selection absent: the entry point absent = no_such_module:SELECTOR "
            r"of selectors 1\.0 cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("class", r"gives type without an instance \(it is a class\)"),
        ("halfway", r"gives str without summaries, .*, by_token, work_model\.attended_pairs"),
        ("nobody", "nobody: must be one of"),
    ],
)
def test_a_broken_entry_point_is_named(packages: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_selector(name)
    assert "\n" not in str(caught.value)


def test_two_packages_with_one_name_are_both_named(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(packages / "more", "others", {"quest": "quest:QUEST"})
    monkeypatch.syspath_prepend(str(packages / "more"))
    with pytest.raises(ConfigError, match=r"2 entry points .*of others 1\.0; .*of selectors 1\.0"):
        load_selector("quest")
