# SPDX-License-Identifier: Apache-2.0
"""Everything of Megatron that this package uses, by name: an upgrade that moves it fails here.

The uses are read from the source. scripts/test_megatron_main.sh runs it under Megatron's main.
"""

import ast
import dataclasses
import importlib
import inspect
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import pytest

from sparsebalance_megatron.megatron import compat
from sparsebalance_megatron.megatron.arguments import PLUGIN_DEFAULTS
from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention
from sparsebalance_megatron.megatron.cpu import MEGATRON_DEFAULTS

PACKAGE = Path(compat.__file__).parents[1]

INDIRECT = {
    "megatron.core.datasets.gpt_dataset:GPTDatasetConfig": (
        "random_seed sequence_length blend blend_per_split path_to_cache tokenizer "
        "create_attention_mask sequence_parallel_size"
    ),
    "megatron.core.models.gpt:GPTModel": "rope_scaling_factor seq_len_interpolation_factor",
    # These two take what the functions of submodules take.
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules": (
        "qk_layernorm normalization"
    ),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules": (
        "qk_layernorm qk_l2_norm use_te_activation_func use_grouped_gemm_for_dense_mlp"
    ),
    "megatron.core.packed_seq_params:PackedSeqParams": (
        "qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv"
    ),
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "new_state",
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": (
        "tensor as_numpy record_stream"
    ),
}
"""Parameters and fields that are passed as ``**keywords``, inherited, or taken by a replacement."""

SET_WHILE_VALIDATING = {
    *("consumed_train_samples", "consumed_valid_samples", "data_parallel_size", "iteration"),
    *("local_rank", "padded_vocab_size", "params_dtype", "rank", "recompute_modules", "world_size"),
}
"""Attributes that Megatron adds to its arguments after parsing them."""


def uses_in(source: str) -> Iterator[tuple[str, ast.Call | None]]:
    """(symbol, call) of every import, attribute of an import, and call of one."""
    tree = ast.parse(source)
    symbols: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            symbols |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.startswith("megatron.")]
            symbols |= {alias.asname or alias.name: alias.name for alias in names}
    yield from ((symbol, None) for symbol in symbols.values())
    for node in ast.walk(tree):
        call = node if isinstance(node, ast.Call) else None
        used = node.func if call else node
        if isinstance(used, ast.Name) and used.id in symbols:
            yield symbols[used.id], call
        elif isinstance(used, ast.Attribute) and getattr(used.value, "id", None) in symbols:
            yield f"{symbols[used.value.id]}.{used.attr}", call


def package_uses() -> dict[str, list[ast.Call]]:
    uses: dict[str, list[ast.Call]] = {}
    for path in PACKAGE.rglob("*.py"):
        for symbol, call in uses_in(path.read_text("utf-8")):
            uses.setdefault(symbol, []).extend([call] if call else [])
    return uses


USES = package_uses()


def check_call(call: ast.Call, found: Any) -> None:
    """Fail if a function does not take as many arguments, or not those keywords."""
    places = [None for each in call.args if not isinstance(each, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    is_whole = len(places) == len(call.args) and len(keywords) == len(call.keywords)
    signature = inspect.signature(found)
    (signature.bind if is_whole else signature.bind_partial)(*places, **keywords)


def resolve(symbol: str) -> Any:
    """The object behind ``package.module:name.attribute`` or ``package.module.attribute``."""
    module, _, names = symbol.partition(":")
    if names:
        found: Any = importlib.import_module(module)
    else:
        try:
            return importlib.import_module(symbol)
        except ModuleNotFoundError:
            module, _, names = symbol.rpartition(".")
            found = importlib.import_module(module)
    for name in names.split("."):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def parameters_of(found: Any) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found) if field.init}
    return set(inspect.signature(found).parameters)


@pytest.mark.parametrize("symbol", USES)
def test_megatron_has_what_the_package_uses(symbol: str) -> None:
    found = resolve(symbol)
    if not isinstance(found, BuiltinFunctionType):  # compiled: without a signature
        for call in USES[symbol]:
            check_call(call, found)


@pytest.mark.parametrize("symbol", INDIRECT)
def test_megatron_takes_what_is_passed_indirectly(symbol: str) -> None:
    assert set(INDIRECT[symbol].split()) <= parameters_of(resolve(symbol))


def test_the_models_config_has_the_fields_that_are_read() -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    read = attributes_of("transformer_config") | {"kv_channels", "timers"}
    read |= {"finalize_model_grads_func", "attention_dropout"}
    assert len(read) > 20
    assert read <= parameters_of(TransformerConfig) | parameters_of(MLATransformerConfig)


def test_the_parsed_arguments_have_the_attributes_that_are_read() -> None:
    known = {action.dest for action in megatron_parser()._actions} | SET_WHILE_VALIDATING
    read = {name for name in attributes_of("args") if not name.startswith("sparse_balance")}
    assert len(read) > 20
    assert read - known == set()
    assert {*PLUGIN_DEFAULTS, *MEGATRON_DEFAULTS} <= known


def test_core_attention_takes_all_that_megatrons_takes() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(DotProductAttention, method)).parameters
        ours = inspect.signature(getattr(BudgetedCoreAttention, method)).parameters
        assert set(theirs) <= set(ours), method
    positional = list(inspect.signature(DotProductAttention.forward).parameters)[:5]
    assert positional == ["self", "query", "key", "value", "attention_mask"]


def test_custom_layouts_are_lists_of_layer_types() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    class Config:
        pipeline_model_parallel_layout = PipelineParallelLayerLayout("Et|tt|(t|)*2,ttL|L", 3)

    assert compat.stage_layers(Config()) == (((0,), (4,)), ((1, 2), (5, 6)), ((3,), ()))


def test_the_version_has_no_commit_of_the_surrounding_repository() -> None:
    assert compat.megatron_version().count(".") == 2
    assert "+" not in compat.megatron_version()


def attributes_of(variable: str) -> set[str]:
    """Attributes that the package reads of variables of that name, or of ``self._`` and it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                if name in (variable, f"_{variable}"):
                    found.add(node.attr)
    return found


def megatron_parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))
