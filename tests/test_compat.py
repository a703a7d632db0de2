# SPDX-License-Identifier: Apache-2.0
"""Everything of Megatron that this package uses, by name: an upgrade that moves it fails here.

The uses are read from the source, so a new one needs an entry. Holds for every megatron-core that
this package supports; scripts/test_megatron_0_18.sh runs it under the oldest.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparsebalance_megatron.megatron import compat
from sparsebalance_megatron.megatron.arguments import PLUGIN_DEFAULTS
from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention
from sparsebalance_megatron.megatron.cpu import MEGATRON_DEFAULTS

PACKAGE = Path(compat.__file__).parents[1]
NEWEST = (0, 19)

USES = {
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder": (
        "cls sizes is_built_on_rank config"
    ),
    "megatron.core.datasets.gpt_dataset:GPTDataset": "",
    "megatron.core.datasets.gpt_dataset:GPTDatasetConfig": (
        "random_seed sequence_length blend blend_per_split path_to_cache tokenizer "
        "create_attention_mask sequence_parallel_size"
    ),
    "megatron.core.datasets.gpt_dataset:MockGPTDataset": "",
    "megatron.core.datasets:helpers": "",
    "megatron.core.datasets:helpers.build_blending_indices": "",
    "megatron.core.datasets.utils": "",
    "megatron.core.datasets.utils.compile_helpers": "",
    "megatron.core.dist_checkpointing.dict_utils:nested_values": "x",
    "megatron.core.dist_checkpointing.mapping:ShardedObject": "",
    "megatron.core.dist_checkpointing.mapping:ShardedTensor": "",
    "megatron.core.dist_checkpointing.mapping:apply_factories": "sharded_state_dict",
    "megatron.core.enums:ModelType": "",
    "megatron.core.enums:ModelType.encoder_or_decoder": "",
    "megatron.core.models.gpt:GPTModel": (
        "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
        "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights "
        "position_embedding_type rotary_percent rotary_base rope_scaling rope_scaling_factor "
        "seq_len_interpolation_factor vp_stage pg_collection"
    ),
    "megatron.core.models.gpt:gpt_layer_specs": "",
    "megatron.core.models.gpt:gpt_layer_specs.get_gpt_decoder_block_spec": (
        "config use_transformer_engine normalization qk_l2_norm vp_stage"
    ),
    # Takes what the function of submodules takes, see test_layer_specs_take_what_we_pass.
    "megatron.core.models.gpt:gpt_layer_specs.get_gpt_layer_local_spec": (
        "qk_layernorm normalization"
    ),
    "megatron.core.models.gpt:gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec": (
        "qk_layernorm qk_l2_norm use_te_activation_func use_grouped_gemm_for_dense_mlp"
    ),
    "megatron.core.num_microbatches_calculator:StepBatchsizeNumMicroBatchesCalculator": (
        "micro_batch_size data_parallel_size decrease_batch_size_if_needed rank schedule seq_length"
    ),
    "megatron.core.package_info:__version__": "",
    "megatron.core.packed_seq_params:PackedSeqParams": (
        "qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv"
    ),
    "megatron.core.rerun_state_machine:get_rerun_state_machine": "",
    "megatron.core.tensor_parallel.random": "",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": "",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": "new_state",
    "megatron.core.tensor_parallel.random:is_checkpointing": "",
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": "seed",
    "megatron.core.transformer.enums:AttnMaskType": "",
    "megatron.core.transformer.enums:AttnMaskType.causal": "",
    "megatron.core.transformer.enums:AttnMaskType.padding_causal": "",
    "megatron.core.transformer.enums:LayerType": "",
    "megatron.core.transformer.enums:LayerType.decoder": "",
    "megatron.core.transformer.module:MegatronModule": "config",
    "megatron.core.transformer.moe.token_dispatcher": "",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": (
        "tensor as_numpy record_stream"
    ),
    "megatron.core.transformer.moe.moe_utils:get_align_size_for_quantization": "config",
    "megatron.core.transformer.spec_utils:ModuleSpec": "module params submodules",
    "megatron.core.transformer.transformer_block:get_num_layers_to_build": (
        "config vp_stage pp_rank"
    ),
    "megatron.core.transformer.transformer_layer:get_transformer_layer_offset": (
        "config vp_stage pp_rank"
    ),
    "megatron.core.utils:get_model_config": "model",
    "megatron.core.utils:unwrap_model": "model",
    "megatron.core:dist_checkpointing": "",
    "megatron.core:dist_checkpointing.check_is_distributed_checkpoint": "checkpoint_dir",
    "megatron.core:dist_checkpointing.load": "sharded_state_dict checkpoint_dir",
    "megatron.core:dist_checkpointing.load_common_state_dict": "checkpoint_dir",
    "megatron.core:dist_checkpointing.load_content_metadata": "checkpoint_dir",
    "megatron.core:parallel_state": "",
    "megatron.core:parallel_state.destroy_model_parallel": "",
    "megatron.core:parallel_state.get_context_parallel_world_size": "",
    "megatron.core:parallel_state.get_data_parallel_group": "with_context_parallel",
    "megatron.core:parallel_state.get_data_parallel_rank": "with_context_parallel",
    "megatron.core:parallel_state.get_data_parallel_world_size": "",
    "megatron.core:parallel_state.get_pipeline_model_parallel_rank": "",
    "megatron.core:parallel_state.get_tensor_model_parallel_rank": "",
    "megatron.core:parallel_state.initialize_model_parallel": "",
    "megatron.training.argument_utils": "",
    "megatron.training.argument_utils:ArgumentGroupFactory": "src_cfg_class",
    "megatron.training.argument_utils:gpt_config_from_args": "args",
    "megatron.training.argument_utils:pretrain_cfg_container_from_args": "args",
    "megatron.training.arguments:core_transformer_config_from_args": "args",
    "megatron.training.arguments:parse_and_validate_args": "extra_args_provider",
    "megatron.training.arguments:parse_args": "extra_args_provider",
    "megatron.training.arguments:validate_args": "args",
    "megatron.training.checkpointing:find_checkpoint_rank_0": "checkpoints_path iteration release",
    "megatron.training.checkpointing:get_checkpoint_tracker_filename": "checkpoints_path",
    "megatron.training.checkpointing:load_args_from_checkpoint": "args load_arg",
    "megatron.training.checkpointing:save_checkpoint": (
        "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far release"
    ),
    "megatron.training.global_vars:get_args": "",
    "megatron.training.global_vars:get_tensorboard_writer": "",
    "megatron.training.global_vars:get_tokenizer": "",
    "megatron.training.global_vars:get_wandb_writer": "",
    "megatron.training.global_vars:set_global_variables": "args build_tokenizer",
    "megatron.training.theoretical_memory_usage:compute_weight_and_optimizer_memory": "args",
    "megatron.training.training": "",
    "megatron.training.training:get_optimizer_param_scheduler": "optimizer",
    "megatron.training.utils:get_blend_and_blend_per_split": "args",
    "megatron.training:get_args": "",
    "megatron.training:pretrain": (
        "cfg_container train_valid_test_dataset_provider model_type forward_step_func "
        "model_provider"
    ),
}
"""``module:name`` or ``module.name`` -> parameters or fields that we pass or rely on."""

SINCE_0_19 = {"megatron.training.argument_utils:gpt_config_from_args"}

SET_WHILE_VALIDATING = {
    *("consumed_train_samples", "consumed_valid_samples", "data_parallel_size", "iteration"),
    *("local_rank", "padded_vocab_size", "params_dtype", "rank", "recompute_modules", "world_size"),
}
"""Attributes that Megatron adds to its arguments after parsing them."""


def megatron_is_at_least(*version: int) -> bool:
    return tuple(int(part) for part in compat.megatron_version().split(".")[:2]) >= version


def uses_in(source: str) -> Iterator[tuple[str, frozenset[str]]]:
    """(symbol, keywords passed to it) of every import, attribute of an import, and call of one."""
    tree = ast.parse(source)
    symbols: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            symbols |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.startswith("megatron.")]
            symbols |= {alias.asname or alias.name: alias.name for alias in names}
    yield from ((symbol, frozenset()) for symbol in symbols.values())

    def symbol_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return symbols.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = symbols.get(node.value.id)
            return owner and f"{owner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        symbol = symbol_of(node.func if isinstance(node, ast.Call) else node)
        if symbol is not None:
            keywords = node.keywords if isinstance(node, ast.Call) else []
            yield symbol, frozenset(keyword.arg for keyword in keywords if keyword.arg)


@cache
def package_uses() -> dict[str, frozenset[str]]:
    uses: dict[str, frozenset[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for symbol, keywords in uses_in(path.read_text("utf-8")):
            uses[symbol] = uses.get(symbol, frozenset()) | keywords
    return uses


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


def test_every_use_has_an_entry_and_every_entry_a_use() -> None:
    assert set(package_uses()) == set(USES)


def test_uses_are_found_in_source() -> None:
    imports = "from megatron.core import a as b\nimport megatron.x.y as z\nimport numpy as n\n"
    assert set(uses_in(imports + "b.c(1, d=2)\nz.e\nn.f(g=3)\nh.i")) == {
        ("megatron.core:a", frozenset()),
        ("megatron.core:a.c", frozenset({"d"})),
        ("megatron.core:a.c", frozenset()),
        ("megatron.x.y", frozenset()),
        ("megatron.x.y.e", frozenset()),
    }


@pytest.mark.parametrize("symbol", USES)
def test_megatron_has_what_the_package_uses(symbol: str) -> None:
    if symbol in SINCE_0_19 and not megatron_is_at_least(*NEWEST):
        assert not compat.has_model_config()
        return
    found = resolve(symbol)
    relied_on = set(USES[symbol].split())
    assert package_uses()[symbol] <= relied_on
    if relied_on and not symbol.endswith("_spec"):
        assert relied_on <= parameters_of(found)


def test_layer_specs_take_what_we_pass() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    for spec, submodules in (
        ("get_gpt_layer_local_spec", "get_gpt_layer_local_submodules"),
        (
            "get_gpt_layer_with_transformer_engine_spec",
            "get_gpt_layer_with_transformer_engine_submodules",
        ),
    ):
        passed = set(USES[f"megatron.core.models.gpt:gpt_layer_specs.{spec}"].split())
        assert passed <= parameters_of(getattr(gpt_layer_specs, submodules)), spec


def test_answers_about_the_version_are_those_of_the_version() -> None:
    newest = megatron_is_at_least(*NEWEST)
    assert compat.has_model_config() == newest
    assert compat.has_yarn_flags() == newest
    training = importlib.import_module("megatron.training.training")
    assert callable(training.update_seqlen_stats_from_cu_seqlens)


def test_the_models_config_has_the_fields_that_are_read() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    read = attributes_of("transformer_config") | {"kv_channels", "timers"}
    read |= {"finalize_model_grads_func", "attention_dropout"}
    assert len(read) > 20
    assert read <= parameters_of(TransformerConfig)


def test_the_parsed_arguments_have_the_attributes_that_are_read() -> None:
    known = {action.dest for action in megatron_parser()._actions} | SET_WHILE_VALIDATING
    read = {name for name in attributes_of("args") if not name.startswith("sparse_balance")}
    assert len(read) > 20
    assert read - known == set()
    assert {*PLUGIN_DEFAULTS, *MEGATRON_DEFAULTS} <= known


def test_layers_have_a_core_attention_to_replace() -> None:
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    assert "core_attention" in parameters_of(SelfAttentionSubmodules)
    assert "self_attention" in parameters_of(TransformerLayerSubmodules)
    assert "layer_specs" in parameters_of(TransformerBlockSubmodules)


def test_core_attention_takes_all_that_megatrons_takes() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(DotProductAttention, method)).parameters
        ours = inspect.signature(getattr(BudgetedCoreAttention, method)).parameters
        assert set(theirs) <= set(ours), method
    positional = list(inspect.signature(DotProductAttention.forward).parameters)[:5]
    assert positional == ["self", "query", "key", "value", "attention_mask"]


def test_custom_layouts_are_lists_of_layer_types() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    class Config:
        pipeline_model_parallel_layout = PipelineParallelLayerLayout("Et|tt|(t|)*2,ttL|L", 3)

    assert compat.stage_layers(Config()) == (((0,), (4,)), ((1, 2), (5, 6)), ((3,), ()))


def test_schedules_start_the_timers_that_are_watched() -> None:
    from megatron.core.pipeline_parallel import schedules

    from sparsebalance_megatron.megatron import timers

    source = inspect.getsource(schedules)
    watched = {value for name, value in vars(timers).items() if name.endswith("_TIMER")}
    assert watched
    assert all(f"'{name}'" in source or f'"{name}"' in source for name in watched)


def test_the_version_has_no_commit_of_the_surrounding_repository() -> None:
    assert compat.megatron_version().count(".") == 2
    assert "+" not in compat.megatron_version()


def test_processes_that_tests_start_use_the_same_megatron() -> None:
    from harness import python_environment

    program = "from sparsebalance_megatron.megatron.compat import megatron_version as v; print(v())"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == compat.megatron_version()


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
