# SPDX-License-Identifier: Apache-2.0
"""Flags and the combinations that are refused."""

from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron import unsupported
from sparsebalance_megatron.megatron.arguments import (
    add_sparse_balance_args,
    args_provider,
    check_typed_flags,
    config_from_args,
    destination,
)
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.unsupported import (
    MODEL,
    SEGMENTS,
    TRAINING,
    Settings,
    check_model,
    check_optimizer,
    check_resumed,
    check_schedule,
    check_segments,
    check_supported,
    shards_unequally,
)


def parse(*flags: str) -> Namespace:
    return add_sparse_balance_args(ArgumentParser(allow_abbrev=False)).parse_args(flags)


def test_every_field_has_its_flag_and_default() -> None:
    args = parse()
    for field in fields(SparseBalanceConfig):
        is_open = field.name == "dense_up_to"
        assert getattr(args, destination(field.name)) == (None if is_open else field.default)
        assert flag_name(field.name).startswith("--sparse-balance")
    assert config_from_args(args) == SparseBalanceConfig()


def test_flags_that_a_yaml_file_replaced_are_missed_by_name() -> None:
    with pytest.raises(ConfigError, match="--yaml-cfg"):
        config_from_args(Namespace())


def test_an_error_of_the_parser_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    parser = args_provider(enabled=True, on_cpu=False)(ArgumentParser(usage=""))
    with pytest.raises(SystemExit):
        parser.parse_args(["--sparse-balance-base-budget", "x\n" * 5000])
    (_, line) = capsys.readouterr().err.splitlines()
    assert "--sparse-balance-base-budget: invalid int value" in line and len(line) < 1100


SUPPORTED = (
    *("--sparse-balance", "--data-path", "prefix", "--seq-length", "256", "--num-layers", "4"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3"),
    *("--train-iters", "4", "--eval-interval", "1000"),
)

TYPED = {
    "--context-parallel-size": "3",
    "--sequence-packing-scheduler": "dp_balanced",
    "--pad-packed-seq-alignment": "128",
    "--thd-max-packed-sequences": "8",
    "--thd-tail-padding-policy": "extend_last",
    "--cp-partition-mode": "contiguous",
    "--linear-attention-type": "gated_delta_net",
    "--rotary-base-per-layer": "10000.0 1000000.0",
    "--hierarchical-context-parallel-sizes": "2 2",
    "--seq-length": "254 --context-parallel-size 2",
    "--tensor-parallel-num-weight-shards": "2",
    "--expert-tensor-parallel-num-weight-shards": "2",
    "--moe-token-dispatcher-type": "allgather --num-experts 4",
    "--moe-pad-expert-input-to-capacity": " --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
    "--moe-router-load-balancing-type": "aux_loss global_aux_loss --num-experts 4 "
    "--moe-token-dispatcher-type alltoall",
    "--moe-paged-stash": " --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
    "--num-query-groups": "1 --group-query-attention --tensor-model-parallel-size 2 "
    "--sparse-balance-selection token-kv-head",
    "--cuda-graph-impl": "local",
    "--transformer-impl": "inference_optimized",
    "--attention-backend": "local",
    "--experimental-attention-variant": "dsa",
    "--hybrid-layer-pattern": "M*-",
    "--hybrid-override-pattern": "M*-",
    "--spec": "module name",
    "--heterogeneous-layers-config-path": "layers.json",
    "--mtp-num-layers": "1",
    "--position-embedding-type": "mrope",
    "--attention-dropout": "0.1",
    "--tensor-model-parallel-size": "2 --multi-latent-attention --transformer-impl local "
    "--no-rope-fusion",
    "--window-size": "128,0",
    "--rampup-batch-size": "1 1 8",
    "--step-batch-size-schedule": "0:4 --lr-decay-style cosine",
    "--iterations-to-skip": "3",
    "--phase-transition-iterations": "3",
    "--object-storage-cache-path": "cache",
    "--split": "99 --train-data-path other",
    "--dataloader-type": "cyclic",
    "--logits-save-dir": "logits",
    "--logits-load-dir": "logits",
    "--yaml-cfg": "config.yaml",
    "--non-persistent-ckpt-type": "local",
    "--override-ckpt-iteration": "3",
    "--ckpt-format": "torch --save checkpoints",
}
"""Flag -> what to type after it for it to be refused; nothing after the others."""
NEWER = {
    *("--enable-mhc-connections", "--cp-partition-mode", "--dynamic-context-parallel"),
    *("--linear-attention-type", "--pad-packed-seq-alignment", "--rotary-base-per-layer"),
    *("--sequence-packing-scheduler", "--thd-max-packed-sequences", "--use-varlen-dataset"),
    *("--thd-tail-padding-policy", "--dataloader-fast-cache-load"),
    "--dataloader-defer-npy-index-mmap",
}
"""Flags that megatron-core 0.19 lacks."""
NOT_TYPED = {
    "no --data-path": {"data_path": None},
    "ModelOpt": {"modelopt_enabled": True},
    "per-sample loss": {"calculate_per_token_loss": False},
    "--use-torch-fsdp2": {
        **{"use_torch_fsdp2": True, "save": "checkpoints", "world_size": 8},
        **{"hidden_size": 64, "num_experts": 12},
    },
    "fp8_dot_product_attention": {"fp8_dot_product_attention": True},
    "fp8_multi_head_attention": {"fp8_multi_head_attention": True},
}
"""Refused by what the arguments hold in the end."""


@pytest.mark.parametrize("flag", [flag for flag in MODEL | TRAINING if flag not in NOT_TYPED])
def test_what_is_refused_as_typed(flag: str, megatron_parser: ArgumentParser) -> None:
    """Through Megatron's parser, before Megatron's own assertions."""
    if flag in NEWER and flag not in megatron_parser._option_string_actions:
        pytest.skip(f"megatron-core {megatron_version()} has no {flag}")
    typed = TYPED.get(flag, "")
    with pytest.raises(ConfigError) as caught:
        check_typed_flags(megatron_parser, (*SUPPORTED, *f"{flag} {typed}".split()))
    given = f"{flag} {typed.partition(' --')[0]}".strip().replace(",", " ")
    assert str(caught.value).startswith(f"--sparse-balance with {given}: ")


@pytest.mark.parametrize(
    "typed",
    [
        *("--num-layers 0", "--num-layers 10000000", "--hidden-size 0", "--rotary-base 0"),
        "--num-query-groups 3 --group-query-attention --num-attention-heads 4",
        *("--num-query-groups 0 --group-query-attention", "--kv-channels 0", "--adam-beta2 2"),
        *(
            "--hidden-dropout 1.5",
            "--eval-interval 0",
            "--log-interval 0",
            "--init-method-std -1.0",
        ),
        "--kv-channels 15 --position-embedding-type rope",
        "--rotary-seq-len-interpolation-factor 0",
    ],
)
def test_sizes_of_no_model_are_refused(typed: str, megatron_parser: ArgumentParser) -> None:
    with pytest.raises(ConfigError, match=f"^{typed.split()[0]} .*: must be "):
        check_typed_flags(megatron_parser, (*SUPPORTED, *typed.split()))


def test_packages_that_flags_need_are_named(
    megatron_parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported, "find_spec", lambda name: None)
    flags = ("--optimizer", "lion", "--wandb-project", "own")
    lines = check_typed_flags(megatron_parser, (*SUPPORTED, *flags))
    assert [line.partition(": ")[0] for line in lines] == ["--optimizer lion", "--wandb-project"]
    assert check_typed_flags(megatron_parser, SUPPORTED) == []


@pytest.mark.parametrize("flag", NOT_TYPED)
def test_what_is_refused_in_the_end(flag: str) -> None:
    config = SparseBalanceConfig(enabled=True)
    supported = {"seq_length": 256, "data_path": ["prefix"], "dataloader_type": "external"}
    supported |= {"calculate_per_token_loss": True, "attention_dropout": 0.0}
    check_supported(Namespace(**supported), config)
    fixed = SparseBalanceConfig(enabled=True, positions="fixed")
    check_supported(Namespace(**supported, moe_paged_stash=True), fixed)
    with pytest.raises(ConfigError, match=rf"^--sparse-balance with {flag}: "):
        check_supported(Namespace(**supported | NOT_TYPED[flag]), config)


@pytest.mark.parametrize(
    ("differs", "refused"),
    [
        ({}, False),
        ({"world_size": 3, "hidden_size": 96, "swiglu": False}, False),
        ({"world_size": 3, "hidden_size": 96, "swiglu": True}, True),
        ({"num_experts": 4}, True),
        ({"num_experts": 4, "save": None}, False),
        ({"num_experts": 4, "tensor_model_parallel_size": 2}, False),
        ({"padded_vocab_size": 260}, True),
        ({"qk_layernorm": True, "kv_channels": 4}, True),
        ({"multi_latent_attention": True, "kv_lora_rank": 20}, True),
    ],
)
def test_shards_are_saved_where_rows_divide(differs: dict[str, Any], refused: bool) -> None:
    megatron = {"use_torch_fsdp2": True, "save": "checkpoints", "world_size": 8}
    megatron |= {"hidden_size": 64, "kv_channels": 4, "num_attention_heads": 16} | differs
    get = Settings(Namespace(**megatron), SparseBalanceConfig())
    assert shards_unequally(get) == refused


def of_experts(ranks: int) -> dict[str, Any]:
    return {"num_experts": 4, "expert_model_parallel_size": ranks}


DISTRIBUTED, SHARDED = {"use_distributed_optimizer": True}, {"use_torch_fsdp2": True}


@pytest.mark.parametrize(
    ("saved", "now", "refused"),
    [
        (of_experts(2), of_experts(1), True),
        (of_experts(1), of_experts(4), True),
        (of_experts(2), of_experts(4), False),
        (of_experts(1), of_experts(1), False),
        (of_experts(2), of_experts(1) | {"num_experts": None}, False),
        ({}, {"optimizer": "sgd"}, True),
        (DISTRIBUTED, SHARDED, True),
        (SHARDED, DISTRIBUTED, True),
        (DISTRIBUTED, {}, True),
        (DISTRIBUTED, DISTRIBUTED, False),
        ({}, SHARDED, False),
        (SHARDED, {}, False),
    ],
)
def test_an_optimizer_that_this_run_cannot_read_is_refused(
    saved: dict[str, Any], now: dict[str, Any], refused: bool
) -> None:
    with pytest.raises(ConfigError, match="--no-load-optim") if refused else nullcontext():
        check_optimizer(Namespace(**saved), Namespace(load="checkpoints", **now))


@pytest.mark.parametrize(
    ("saved", "now", "refused"),
    [
        ({}, {}, True),
        ({}, {"no_load_optim": True}, False),
        ({}, {"load": None}, False),
        ({"no_save_optim": True}, {}, False),
    ],
)
def test_an_optimizer_that_is_not_loaded_is_not_asked(
    saved: dict[str, Any], now: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        unsupported, "arguments_of_weights", lambda args, resumed: Namespace(**saved)
    )
    args = {"no_load_optim": False, "load": "checkpoints", "optimizer": "sgd"} | now
    with pytest.raises(ConfigError) if refused else nullcontext():
        check_resumed(Namespace(**args))


SEGMENTS_REFUSED = {
    "--pipeline-model-parallel-size": {"pipeline_model_parallel_size": 1},
    "--fp8-format": {"fp8": "hybrid"},
    "--fp4-format": {"fp4": "e2m1"},
}
"""Flags that are refused for other values, or by fields of other names, than 2 of their own."""


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"train_iters": 8}, "--train-iters 4, and this run has 8; give --override-opt-param-sch"),
        ({"train_iters": 8, "override_opt_param_scheduler": True}, None),
        ({"train_iters": 8, "skip_train": True}, None),
        ({"train_iters": 8, "global_batch_size": 2}, None),
        ({"train_iters": 4, "global_batch_size": 2}, "--global-batch-size 4, and this run has 2"),
        ({"lr": 1e-4}, "--lr 0.001, and this run has 0.0001"),
        ({}, None),
    ],
)
def test_a_resume_with_another_schedule_names_the_flag(
    differs: dict[str, Any], told: str | None
) -> None:
    saved = {"lr": 1e-3, "min_lr": 0.0, "lr_decay_style": "constant"}
    saved |= {"train_iters": 4, "global_batch_size": 4, "load": "checkpoints"}
    other = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "skip_train")
    args = Namespace(**saved | dict.fromkeys(other) | differs)
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_schedule(Namespace(**saved), args)


@pytest.mark.parametrize("flag", SEGMENTS)
def test_what_is_refused_with_segments(flag: str) -> None:
    def check(max_segments: int, given: dict[str, Any]) -> None:
        config = SparseBalanceConfig(max_segments=max_segments)
        megatron = {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"}
        check_segments(Settings(Namespace(**megatron | given), config))

    refused = SEGMENTS_REFUSED.get(flag, {flag.removeprefix("--").replace("-", "_"): 2})
    check(4, {})
    check(1, refused)
    with pytest.raises(ConfigError, match=rf"^--sparse-balance-max-segments 4 with {flag}\b.*: "):
        check(4, refused)


def test_a_trainer_with_its_own_loop_is_asked_for_its_model_only() -> None:
    config = SparseBalanceConfig(enabled=True)
    model = SimpleNamespace(calculate_per_token_loss=True, mock_data=True, data_path=None)
    check_model(model, config)
    model.context_parallel_size = 6
    with pytest.raises(ConfigError, match=r"^--sparse-balance with --context-parallel-size 6: "):
        check_model(model, config)


def test_refusals_of_models_are_fields_of_a_config() -> None:
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    configs = (HeterogeneousTransformerConfig, MLATransformerConfig)
    of_a_config = {field.name for config in configs for field in fields(config)}

    def named(refusals: dict[str, str]) -> set[str]:
        flags = refusals.keys() - NEWER - NOT_TYPED.keys()
        return {flag.removeprefix("--").replace("-", "_") for flag in flags}

    assert named(MODEL) - of_a_config == {"position_embedding_type"}
    assert named(TRAINING) & of_a_config == set()


LOOK_REFUSED = [
    "--context-parallel-size 1",
    "--context-parallel-size 4 --sparse-balance-max-context-parallel 8",
    "--context-parallel-size 2 --sparse-balance-config context-parallel=static",
    "--context-parallel-size 2 --sparse-balance-max-tokens-per-micro-batch 128",
    "--moe-token-dispatcher-type allgather",
    "--moe-token-dispatcher-type alltoall --num-experts 4",
    "--moe-pad-expert-input-to-capacity --num-experts 4 --moe-token-dispatcher-type alltoall",
    "--num-query-groups 2 --group-query-attention --tensor-model-parallel-size 2",
    "--num-query-groups 1 --group-query-attention --tensor-model-parallel-size 2 "
    "--sparse-balance-selection token-query-head",
    "--tensor-model-parallel-size 2",
    "--num-query-groups 3 --num-attention-heads 4",
    "--kv-channels 15 --position-embedding-type rope --rotary-percent 0.5",
    "--microbatch-group-size-per-virtual-pipeline-stage 4 --pipeline-model-parallel-size 2",
    "--ckpt-format torch_dist --save checkpoints",
    "--ckpt-format torch",
    "--attention-backend flash",
    "--reset-position-ids --reset-attention-mask",
    "--dataloader-type external --attention-dropout 0 --softmax-type vanilla",
]
"""Beside flags that are refused for other values."""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--context-parallel-size=0", "--context-parallel-size 0: "),
        ("--sparse-balance-base-budget=1099511627776", "--sparse-balance-base-budget 1099"),
        (
            "--sparse-balance-max-tokens-per-micro-batch 100",
            "with --seq-length 256: .* use at least 256",
        ),
        *((f"--seed {seed}", "must be 1 to 2147483647") for seed in (-1, 0, 2**31)),
        *((f"--seed {seed}", None) for seed in (1, 2**31 - 1)),
        *((words, None) for words in LOOK_REFUSED),
    ],
)
def test_numbers_that_do_not_go_together(
    words: str, complaint: str | None, megatron_parser: ArgumentParser
) -> None:
    refuses = nullcontext() if complaint is None else pytest.raises(ConfigError, match=complaint)
    with refuses:
        check_typed_flags(megatron_parser, (*SUPPORTED, *words.split()))


@pytest.mark.parametrize(
    ("ranks", "words", "refused"),
    [
        (2, "--global-batch-size 2 --micro-batch-size 2", True),
        (16, "", True),
        (8, "", False),
        (8, "--tensor-model-parallel-size 2 --global-batch-size 4", False),
        (3, "--tensor-model-parallel-size 2", False),
        (4, "--pipeline-model-parallel-size 0", False),
        (16, "--use-checkpoint-args", False),
    ],
)
def test_a_global_batch_fills_its_micro_batches(
    ranks: int,
    words: str,
    refused: bool,
    megatron_parser: ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError, match="must be a multiple of") if refused else nullcontext():
        check_typed_flags(megatron_parser, (*SUPPORTED, *words.split()))


def test_changed_defaults_are_told_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import add_megatron_arguments

    def told(*words: str, enabled: bool = True, on_cpu: bool = False) -> list[str]:
        monkeypatch.setattr("sys.argv", ["program", *words])
        lines: list[str] = []
        provide = args_provider(enabled=enabled, on_cpu=on_cpu, report=lines.append)
        provide(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        return lines

    (line,) = told()
    assert line.startswith("sparse balance: trains as if given --")
    changes = (
        "--calculate-per-token-loss",
        "--attention-dropout 0.0",
        "--dataloader-type external",
    )
    assert all(change in line for change in changes)
    assert "--distributed-backend" not in line
    (line,) = told("--attention-dropout=0", "--dataloader-type", "external")
    assert line == "sparse balance: trains as if given --calculate-per-token-loss"
    assert told(enabled=False) == []
    (line,) = told(enabled=False, on_cpu=True)
    assert "--distributed-backend gloo" in line and "--no-rope-fusion" in line
    assert "--calculate-per-token-loss" not in line
