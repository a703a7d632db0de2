# SPDX-License-Identifier: Apache-2.0
"""Examples: what their steps start, and the steps themselves on tiny data.

Recording stand-ins take the place of programs on PATH: what a step starts is only looked at, or run
in forked processes with the environment that the script gives it. The model and parallel flags stay
as they are; one launched process stands for all ranks. One example is run per push.
"""

import json
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from data.tokenizers_of_tests import train_tokenizer
from forked_ranks import run_alone
from harness import TIMEOUT_S
from recorded_programs import record, recorded, run_bash
from torch.distributed.run import get_args_parser

from sparsebalance_megatron import cli
from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.megatron.arguments import check_typed_flags

REPOSITORY = Path(__file__).parents[1]
_NAMES = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--num-query-groups", "--kv-channels", "--padded-vocab-size"),
)
MODELS = {
    name: dict(zip(_NAMES, ((str(size),) for size in sizes), strict=True))
    for name, sizes in {
        "cluster_7b_sft.sh": (28, 3584, 18944, 28, 4, 128, 152064),
        "cluster_8b_128k.sh": (32, 4096, 14336, 32, 8, 128, 128256),
        "cluster_qwen3_30b_a3b_sft.sh": (48, 2048, 6144, 32, 4, 128, 151936),
        "qwen2.5_0.5b_sft.sh": (24, 896, 4864, 14, 2, 64, 151936),
        "qwen2.5_3b_sft.sh": (36, 2048, 11008, 16, 2, 128, 151936),
    }.items()
}
"""Sizes as published on huggingface.co."""
CLUSTER = ("cluster_7b_sft.sh", "cluster_8b_128k.sh", "cluster_qwen3_30b_a3b_sft.sh")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
pytestmark = pytest.mark.distributed
type FlagValues = tuple[str, ...]


def run_script(
    name: str,
    *arguments: str,
    directory: Path,
    variables: Mapping[str, str] | None = None,
    exit_code: int = 0,
) -> str:
    """Output of an example started in ``directory``, where recorders come before programs."""
    environment = {
        "PATH": f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    words = (str(REPOSITORY / "examples" / name), *arguments)
    return run_bash(words, directory, environment | dict(variables or {}), exit_code=exit_code)


def record_steps(
    name: str, *steps: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None
) -> list[tuple[list[str], dict[str, str]]]:
    """Programs that steps of an example start, and their environment; none of them is run."""
    record(directory, ("bin/python", "bin/sparse-balance", "bin/torchrun"))
    for step in steps:
        run_script(name, *step, directory=directory, variables=variables)
    return recorded(directory)


def calls_of(
    name: str, *steps: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None
) -> list[list[str]]:
    """The calls of sparse-balance and torchrun that steps of an example make."""
    calls = record_steps(name, *(steps or ((),)), directory=directory, variables=variables)
    return [words for words, _ in calls if words[0] != "python"]


def run_step(
    name: str,
    *arguments: str,
    directory: Path,
    variables: Mapping[str, str] | None = None,
    last_words: Sequence[str] = (),
) -> str:
    """Output of the one program that a step of an example starts, with ``last_words`` added."""
    calls = record_steps(name, arguments, directory=directory, variables=variables)
    (((program, *words), environment),) = calls
    if program == "sparse-balance":
        words = ["-m", "sparsebalance_megatron.cli", *words]
    environment["OMP_NUM_THREADS"] = "1"
    done = run_alone(
        [*words, *last_words], environment=environment, folder=directory, timeout_s=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr


def training_flags(call: Sequence[str]) -> list[str]:
    """What a call of torchrun gives to the program that all ranks run."""
    return get_args_parser().parse_args(call[1:]).training_script_args


def accepted_flags(call: Sequence[str], parser: ArgumentParser) -> dict[str, FlagValues]:
    """Values of the flags of training, which Megatron's parser knows and the plugin accepts."""
    words = training_flags(call)
    assert not parser.parse_known_args(words)[1]
    check_typed_flags(parser, words)
    return flag_values(words)


def flag_values(words: Sequence[str]) -> dict[str, FlagValues]:
    """Flag -> its values."""
    values: dict[str, FlagValues] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            values[flag] = ()
        else:
            values[flag] += (word,)
    return values


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents, conversations, and a tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("examples")
    turns = [("user", "How many?"), ("assistant", "Four."), ("user", "Sure?"), ("assistant", "Yes")]
    conversations, documents = [], []
    for number in range(40):
        messages = [
            {"role": role, "content": content * (1 + number % 5)} for role, content in turns
        ]
        conversations.append(json.dumps({"messages": messages[: 2 + 2 * (number % 2)]}))
        documents.append(json.dumps({"text": f"document {number} " * (1 + number * 7 % 30)}))
    (directory / "conversations.jsonl").write_text("\n".join(conversations))
    (directory / "documents.jsonl").write_text("\n".join(documents * 5))
    texts = (json.loads(document)["text"] for document in documents)
    tokenizer = train_tokenizer(texts, 300, directory / "small_tokenizer")
    words = ("--input", str(directory / "documents.jsonl"), "--tokenizer", tokenizer)
    assert cli.main(["prepare-data", *words, "--output-prefix", str(directory / "small")]) == 0
    settings_path = directory / "small_tokenizer" / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    settings_path.write_text(json.dumps(settings))
    return directory


def one_process(**others: str) -> dict[str, str]:
    """Variables of a machine that has no GPU and is alone."""
    return {"NNODES": "1", "GPUS_PER_NODE": "1", "MODEL": "small_tokenizer"} | others


def test_fine_tuning_0_5b_prepare_profile_plan(work: Path) -> None:
    name, variables = "qwen2.5_0.5b_sft.sh", one_process(SEQ_LENGTH="256")
    prepared = run_step(name, "prepare", directory=work, variables=variables)
    assert "40 documents" in prepared and "loss on" in prepared
    # Some CPUs take a minute for a product of bfloat16 with the vocabulary of 151,936.
    step = partial(
        run_step,
        name,
        directory=work,
        variables=variables,
        last_words=("--padded-vocab-size", "2048"),
    )
    profiled = step("profile", "--quick")
    assert "runs/qwen2.5_0.5b_sft/cost_table.json:" in profiled
    planned = step("--sparse-balance-dry-run", "8")
    assert "dry run of 8 ranks: tensor 2 x pipeline 1 x data 4" in planned
    assert re.search(r"those of .*: \d+ measurements of", planned)
    assert "step: " in planned


@pytest.mark.parametrize("name", ["qwen2.5_0.5b_sft.sh", "cpu_quickstart.sh"])
def test_a_refused_dry_run_ends_with_its_error(name: str, tmp_path: Path) -> None:
    """One process plans for all ranks, so no launcher prints below it."""
    wrong = "--sparse-balance-dry-run", "--sparse-balance-block-size", "0"
    (error,) = run_script(name, *wrong, directory=tmp_path, exit_code=2).splitlines()
    assert "--sparse-balance-block-size 0" in error


@pytest.mark.parametrize("name", [*MODELS, "longcontext_pretrain.sh", "cpu_quickstart.sh"])
def test_flags_are_accepted_and_make_the_public_model(
    name: str, megatron_parser: ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's parser knows all of them, and the plugin refuses none."""
    (call,) = calls_of(name, directory=tmp_path)
    launch = get_args_parser().parse_args(call[1:])
    ranks = int(launch.nnodes.partition(":")[0]) * int(launch.nproc_per_node)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    given = accepted_flags(call, megatron_parser)
    if name not in MODELS:
        return
    assert MODELS[name].items() <= given.items()
    assert ("--untie-embeddings-and-output-weights" in given) == (name in CLUSTER)


@pytest.mark.parametrize(("tokens", "kind"), [("40960", "rope"), ("131072", "yarn")])
def test_sequences_beyond_pretraining_take_yarn(tokens: str, kind: str, tmp_path: Path) -> None:
    name, variables = "cluster_qwen3_30b_a3b_sft.sh", {"SEQ_LENGTH": tokens}
    (call,) = calls_of(name, directory=tmp_path, variables=variables)
    given = flag_values(training_flags(call))
    assert given["--position-embedding-type"] == (kind,)
    assert ("--rotary-scaling-factor" in given) == (kind == "yarn")


def test_cluster_scripts_compare_two_runs_that_share_nothing_but_samples(tmp_path: Path) -> None:
    steps = (["baseline", "--exit-interval", "20"], ["--exit-interval", "20"])
    calls = calls_of("cluster_7b_sft.sh", *steps, directory=tmp_path)
    baseline, balanced = (flag_values(training_flags(call)) for call in calls)
    assert baseline.pop("--sparse-balance-batching") == ("arrival",)
    assert baseline["--sparse-balance-mode"] == balanced["--sparse-balance-mode"] == ("exact",)
    changed = {flag for flag in balanced if baseline[flag] != balanced[flag]}
    assert changed == {"--sparse-balance-log-dir", "--tensorboard-dir", "--load", "--save"}
    assert set(baseline) == set(balanced)


@pytest.mark.parametrize("name", CLUSTER)
def test_cluster_scripts_plan_what_they_train(name: str, tmp_path: Path) -> None:
    """In all modes, and with the cost table once there is one."""
    for table in (False, True):
        vary = ("plan", "--vary", "--tensor-model-parallel-size 2 4")
        (_, *plan), launched = calls_of(name, vary, [], directory=tmp_path)
        asked = cli.parse(plan)
        assert (asked.gpus, asked.vary) == (64, ["--tensor-model-parallel-size 2 4"])
        trained = flag_values(training_flags(launched))
        missing = {"--sparse-balance-mode", *(() if table else ("--sparse-balance-cost-table",))}
        assert trained.keys() - flag_values(asked.passed_on).keys() == missing
        (tmp_path / "runs" / name.removesuffix(".sh")).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name.removesuffix(".sh") / "cost_table.json").touch()


@pytest.mark.parametrize("name", CLUSTER)
def test_cluster_scripts_train_with_the_sensitivities_that_they_measure(
    name: str, tmp_path: Path
) -> None:
    steps = ["sensitivity", "--seed", "7"], []
    variables = {"ATTENTION": "sparse", "COST_TABLE": ""}
    measured, trained = calls_of(name, *steps, directory=tmp_path, variables=variables)
    asked = cli.parse(training_flags(measured))
    assert flag_values(training_flags(trained))["--sparse-balance-sensitivity"] == (
        str(asked.output),
    )
    assert asked.passed_on[-1] == steps[0][-1]


def test_a_cluster_of_experts_is_checked_and_planned(work: Path) -> None:
    name, variables = "cluster_qwen3_30b_a3b_sft.sh", one_process(COST_TABLE="", DATA="small")
    planned = run_step(name, "--sparse-balance-dry-run", "64", directory=work, variables=variables)
    assert "dry run of 64 ranks: tensor 4 x pipeline 1 x data 16" in planned
    assert "step: " in planned


def test_both_runs_of_the_experts_example_take_the_same_model(
    work: Path, megatron_parser: ArgumentParser
) -> None:
    steps = (["prepare"], ["baseline"], ["balance"], ["compare"])
    calls = calls_of("cpu_experts.sh", *steps, directory=work)
    (_, *preparing), baseline, balanced, (_, *comparing) = calls
    prepare, compare = cli.parse(preparing), cli.parse(comparing)
    runs = [accepted_flags(call, megatron_parser) for call in (baseline, balanced)]
    logs = [run.pop("--sparse-balance-log-dir") for run in runs]
    assert logs == [(str(compare.baseline),), (str(compare.run_directory),)]
    assert runs[1]["--data-path"] == (prepare.output_prefix,)
    assert runs[1]["--expert-model-parallel-size"] == ("2",)
    assert {flag for flag in runs[0] | runs[1] if runs[0].get(flag) != runs[1].get(flag)} == {
        *("--sparse-balance-batching", "--sparse-balance-tuning")
    }


@pytest.mark.nightly
def test_cpu_quickstart_trains(work: Path, tmp_path: Path) -> None:
    variables = {"DATA": str(work / "small"), "TRAIN_ITERS": "1"}
    trained = run_script(
        "cpu_quickstart.sh", "--lr-warmup-iters", "0", directory=tmp_path, variables=variables
    )
    assert "iteration        1/       1 |" in trained
    assert (tmp_path / "runs/cpu_quickstart/log/steps.jsonl").is_file()


def test_every_step_hands_its_result_to_training(tmp_path: Path) -> None:
    name = "qwen2.5_0.5b_sft.sh"
    steps = (["prepare"], ["convert"], ["profile", "--quick"], ["--exit-interval", "1"])
    *tools, launched = calls_of(name, *steps, directory=tmp_path)
    prepare, convert, profile = (cli.parse(words) for _, *words in tools)
    assert [prepare.command, convert.command, profile.command] == [
        *("prepare-data", "convert", "profile")
    ]
    trained = flag_values(training_flags(launched))
    assert trained["--data-path"] == (prepare.output_prefix,)
    assert trained["--tokenizer-model"] == (prepare.tokenizer,) == (str(convert.hf_dir),)
    assert trained["--pretrained-checkpoint"] == (str(convert.output),)
    assert trained["--sparse-balance-cost-table"] == (str(profile.output),)
    assert profile.quick and not prepare.append_eod
    assert trained["--exit-interval"] == ("1",)
    measured = flag_values(profile.passed_on)
    # Costs of sparse attention are measured, too, and serve mode exact.
    assert measured.pop("--sparse-balance-base-budget") == ("32",)
    assert measured.pop("--sparse-balance-selection") == ("previous-block",)
    assert {flag: trained[flag] for flag in measured} == measured


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_what_is_evaluated_is_what_was_trained(
    family: str, work: Path, megatron_parser: ArgumentParser
) -> None:
    variables = {"DATA": "small", "FAMILY": family}
    calls = calls_of("evaluate.sh", ["train"], ["convert"], directory=work, variables=variables)
    launched, (_, *converting) = calls
    trained, convert = accepted_flags(launched, megatron_parser), cli.parse(converting)
    assert trained["--save"] == (str(convert.checkpoint_dir),)
    assert trained["--sparse-balance-selection"] == ("token-kv-head",)
    model = read_config(work / convert.hf_config)
    sizes = {
        "--num-layers": model.num_hidden_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.intermediate_size,
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_key_value_heads,
        "--kv-channels": model.head_dim,
        "--max-position-embeddings": model.max_position_embeddings,
    }
    if model.num_experts:
        sizes |= {
            "--num-experts": model.num_experts,
            "--moe-ffn-hidden-size": model.moe_intermediate_size,
            "--moe-router-topk": model.num_experts_per_tok,
        }
        assert ("--moe-router-pre-softmax" in trained) != model.norm_topk_prob
    assert {flag: (str(size),) for flag, size in sizes.items()}.items() <= trained.items()
    assert ("--qk-layernorm" in trained) == model.has_qk_norm
    assert model.model_type == family


def test_slurm_starts_every_node_once(tmp_path: Path) -> None:
    record(tmp_path, ("bin/torchrun",))
    stand_ins = {
        "scontrol": '[[ "$*" == "show hostnames first[1-2]" ]] && printf "first1\\nfirst2\\n"',
        "srun": 'shift; for id in 0 1; do SLURM_NODEID="$id" "$@" || exit; done',
    }
    for program, text in stand_ins.items():
        path = tmp_path / "bin" / program
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    run_script(
        "slurm.sh",
        *(str(REPOSITORY / "examples/qwen2.5_3b_sft.sh"), "--log-progress"),
        directory=tmp_path,
        variables={
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_JOB_NODELIST": "first[1-2]",
            "SLURM_JOB_ID": "123456",
        },
    )
    started = [flag_values(words[1:]) for words, _ in recorded(tmp_path)]
    assert [flags["--node-rank"] for flags in started] == [("0",), ("1",)]
    for flags in started:
        assert flags["--nnodes"] == ("2",) and flags["--nproc-per-node"] == ("8",)
        assert (flags["--master-addr"][0], flags["--master-port"][0]) == ("first1", "23456")
        assert "--log-progress" in flags
