# SPDX-License-Identifier: Apache-2.0
"""Groups of flags, modes, options in a file, and the text of budgets by layer."""

import re
from argparse import ArgumentParser
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.flags import (
    FILE_FLAG,
    MODE_FLAG,
    MODES,
    defaults_given_by,
    flag_groups,
)
from sparsebalance_megatron.integration import one_line_errors
from sparsebalance_megatron.layer_budgets import (
    DENSE,
    FLAG,
    MAX_BLOCKS,
    base_budgets,
    has_dense_layers,
    layer_budgets_text,
    parse_layer_budgets,
)
from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args, config_from_args


def config_of(*words: str) -> SparseBalanceConfig:
    parser = add_sparse_balance_args(ArgumentParser(allow_abbrev=False), words)
    return config_from_args(parser.parse_args(words))


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_flag_is_in_one_group() -> None:
    found = [each.name for group in flag_groups().values() for each in group]
    assert sorted(found) == sorted(each.name for each in fields(SparseBalanceConfig))


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sets_its_fields_and_no_other(mode: str) -> None:
    expected = asdict(SparseBalanceConfig()) | dict(MODES[mode])
    assert asdict(config_of("--sparse-balance-mode", mode)) == expected
    assert asdict(SparseBalanceConfig.of_mode(mode)) == expected


@pytest.mark.parametrize(
    ("mode", "options", "named"),
    [
        ("exat", {}, "must be one of default, exact"),
        ("exact", {"base_budget": 8}, "base_budget has no effect in mode exact"),
        ("exact", {"baching": "length"}, "did you mean batching?"),
        ("paper", {"block_size": 100}, "a power of two"),
    ],
)
def test_modes_in_python_are_checked(mode: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        SparseBalanceConfig.of_mode(mode, **options)
    assert SparseBalanceConfig.of_mode("paper", batching="length").tuning == "anchor"


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_over_the_file_and_the_file_over_the_mode(
    tmp_path: Path, first: bool
) -> None:
    path = written(
        tmp_path / "options.toml",
        'mode = "paper"\nbase-budget = 16\nblock_size = 64\nbatching = "length"\n',
    )
    named = ["--sparse-balance-config", path]
    single = ["--sparse-balance-base-budget", "8"]
    config = config_of(*(named + single if first else single + named))
    assert (config.base_budget, config.block_size) == (8, 64)
    assert (config.batching, config.tuning) == ("length", "anchor")
    config = config_of(*named, "--sparse-balance-mode=baseline")
    assert (config.batching, config.tuning) == ("length", "off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base-budgets = 16", "base-budgets is no option"),
        ('base-budget = "16"', "base-budget: Expected `int`, got `str`"),
        ("base-budget = 0", "options.toml: base-budget 0: must be 1 to"),
        ("base-budget = true", "base-budget: Expected `int`, got `bool`"),
        ('batching = "best"', "options.toml: batching best: must be one of arrival"),
        ('attention = "flash"', "options.toml: attention flash: must be one of auto"),
        ("batching = [1]", "options.toml: batching [1]: must be one of arrival"),
        (f"log-megabytes = {'7' * 5000}", "options.toml: Exceeds the limit"),
        (f"block-size = 0x{'7' * 5000}", "block-size: an integer of more than 64 bits"),
        ('mode = "fastest"', "mode fastest: must be one of default"),
        ('mode = ["paper"]', "mode ['paper']: must be one of default"),
        ("enabled = true", "enabled is for the command line; give --sparse-balance"),
        ('device = "cpu"', "give --sparse-balance-device"),
        ("base-budget = 1\nbase_budget = 2", "base_budget is given twice"),
        ("[table]\nx = 1", "table is no option"),
        ("base-budget", "give a TOML file"),
        ("layer-budgets = " + "[" * 10_000, "options.toml: maximum recursion depth"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_wrong_file_is_named_with_the_option(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "options.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        config_of("--sparse-balance-config", str(path))
    assert message in str(error.value) and str(path) in str(error.value)


def test_options_on_the_command_line(tmp_path: Path) -> None:
    """They win over the file, a later one over an earlier one, and flags over all."""
    path = written(tmp_path / "options.toml", 'router = "torch"\nbase-budget = 16\n')
    words = ["--sparse-balance-config", path, "segment-tokens=32", "base-budget=8"]
    words += ["--sparse-balance-config=calibration=off", "--sparse-balance-block-size", "64"]
    config = config_of(*words, "--sparse-balance-config", "calibration=stages")
    assert (config.router, config.segment_tokens, config.base_budget) == ("torch", 32, 8)
    assert (config.calibration, config.block_size) == ("stages", 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exchange=ring"], "exchange is no option"),
        (["plan-ms=1\nbase-budget=9"], "has several options"),
        (["router=best"], "^--sparse-balance-config router=best: must be one of"),
        (["segment-tokens=0"], "^--sparse-balance-config segment-tokens=0: must be 1 to"),
        (["segment-tokens=many"], "^--sparse-balance-config segment-tokens=many: Expected `int`"),
        (["attention=tokens", "layer-budgets=dense:all"], "-config attention=tokens: serves no"),
        (["mode=exact"], "give --sparse-balance-mode exact"),
        (["one.toml", "other.toml"], "give one file"),
        (["device=cpu"], "give --sparse-balance-device"),
        (["none.toml"], r"none\.toml"),
    ],
)
def test_wrong_options_on_the_command_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("--sparse-balance-config", *words)


def test_a_key_of_many_lines_ends_training_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "options.toml", f'"{"a" * 5000}\\nb" = 1\n')
    with pytest.raises(SystemExit) as ended, one_line_errors():
        config_of("--sparse-balance-config", path)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line and len(line) < 1100


def test_options_without_effect_in_mode_exact_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "options.toml", 'mode = "exact"\nbase-budget = 16\n')
    for words, named in (
        ([MODE_FLAG, "exact", "--sparse-balance-tuning=off"], "--sparse-balance-tuning:"),
        ([FILE_FLAG, path], "base_budget"),
    ):
        with pytest.raises(ConfigError, match=f"{named} has no effect in mode exact"):
            defaults_given_by(words)
    assert defaults_given_by([FILE_FLAG, path, MODE_FLAG, "placement"])["base_budget"] == 16


BUDGETS = st.one_of(st.just(DENSE), st.integers(1, 4), st.integers(1, MAX_BLOCKS))


@given(st.dictionaries(st.integers(0, 40), BUDGETS, min_size=1), st.randoms())
def test_what_is_written_is_read_back(budgets: dict[int, int], random) -> None:
    text = layer_budgets_text(budgets)
    assert dict(parse_layer_budgets(text)) == budgets
    # However it is typed: layer by layer, in any order.
    words = [
        f"{'dense' if budget == DENSE else budget}:{layer}" for layer, budget in budgets.items()
    ]
    random.shuffle(words)
    assert SparseBalanceConfig(layer_budgets=words).layer_budgets == text
    layers = max(budgets) + 3
    assert base_budgets(7, text, layers) == tuple(budgets.get(i, 7) for i in range(layers))
    assert has_dense_layers(text) == (DENSE in budgets.values())


def test_all_are_the_layers_that_have_no_budget_of_their_own() -> None:
    assert SparseBalanceConfig(layer_budgets=["4:1", "dense:all"]).layer_budgets == (
        "4:1 dense:all"
    )
    assert base_budgets(7, "4:1 dense:all", 3) == (DENSE, 4, DENSE)
    assert base_budgets(7, "5:all", 2) == (5, 5)


@pytest.mark.parametrize(
    ("text", "part", "remedy"),
    [
        ("16:0 dense:", "dense:", "such as 0-3,7"),
        ("dense", "dense", "such as 0-3,7"),
        ("dense:3-1", "dense:3-1", "such as 0-3,7"),
        ("dense:-1", "dense:-1", "such as 0-3,7"),
        ("16:0,,1", "16:0,,1", "such as 0-3,7"),
        ("16:0-99999", "16:0-99999", "such as 0-3,7"),
        ("0:1", "0:1", f"1 to {MAX_BLOCKS} blocks"),
        (f"{DENSE}:1", f"{DENSE}:1", f"1 to {MAX_BLOCKS} blocks"),
        ("sparse:1", "sparse:1", "must begin with dense"),
        ("8:0-3 dense:3", "dense:3", "layer 3 is named twice"),
        ("8:all dense:all", "dense:all", "all is named twice"),
        (" ", "' '", "drop the flag"),
    ],
)
def test_refusals_name_flag_part_and_remedy(text: str, part: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SparseBalanceConfig(layer_budgets=text)
    assert str(caught.value).startswith(f"{FLAG} {part}: ")
    assert remedy in str(caught.value)


def test_layers_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=f"{FLAG} dense:3-4: names layer 4; .* are 0 to 3"):
        base_budgets(8, "dense:3-4", 4)


def test_dense_layers_have_an_implementation() -> None:
    with pytest.raises(ConfigError, match="attention=tokens: serves no dense layers"):
        SparseBalanceConfig(attention="tokens", layer_budgets="dense:0")
    SparseBalanceConfig(attention="tokens", layer_budgets="4:0")
