# SPDX-License-Identifier: Apache-2.0
"""What users depend on, frozen: a failure here means that somebody's script would break.

Change it together with CHANGELOG.md. docs/FLAGS.md freezes flags, choices and defaults;
scripts make it and other pages.
"""

import re
import runpy
from inspect import getmembers, isfunction, signature
from pathlib import Path

import pytest

import sparsebalance_megatron
from sparsebalance_megatron import cli, integration

ROOT = Path(__file__).parents[1]
EXPORTS = ["SparseBalanceConfig", "__version__"]
INTEGRATION = {
    "HostJob": """layout shape max_sample_tokens global_batch_size pad_samples_to recompute_all
        recompute_attention neighbours_per_node expert_parallel_size frozen_weights
        takes_packed_sequences""",
    "HostPlanner": "config job cost clock",
    "Job": """stage_layers data_parallel_size micro_batches context_parallel_size
        micro_batch_group_size lockstep_ranks order""",
    "PlannedLengths": "samples ms by_tokens_ms lower_bound_ms",
    "PlannedStep": "plan samples scales plan_ms wait_ms",
    "arguments_provider": "other",
    "begin_host_run": """config transformer_config vocab_size max_sample_tokens global_batch_size
        pad_samples_to frozen_weights scales_own_loss lockstep_ranks device""",
    "begin_run": """config transformer_config vocab_size data_prefix seq_length micro_batch_size
        global_batch_size split seed device warm_up_samples order""",
    "is_enabled": "args",
    "plan_lengths": "lengths_tokens ranks stages model layers micro_batches config",
    "training_hooks": "args",
    "window_places": "lengths_S steps seed share first_sample",
}
"""Function or record of sparsebalance_megatron.integration -> its parameters."""
HANDLES = {
    "HostPlanner": {
        "learn": "planned measured",
        "load_state_dict": "state",
        "plan": "lengths_tokens micro_batches placement pinned_LS step",
        "state_dict": "",
    },
    "HostRun": {
        "attach": "planned position packed_seq_params model vp_stage learn",
        "cut": "planned position values padding",
        "end_step": "",
        "layer_spec": "spec vp_stage",
        "load_state_dict": "state",
        "plan_as_placed": "lengths_tokens pinned_LS",
        "state_dict": "",
        "whole": "planned position values",
    },
    "TrainerRun": {
        "end_step": "",
        "evaluation_data_iterator": "index consumed_samples vp_stage",
        "layer_spec": "spec vp_stage",
        "load_state_dict": "state",
        "start": "consumed_samples iteration",
        "state_dict": "",
        "train_data_iterator": "consumed_samples vp_stage",
        "wrap_forward_step": "forward_step",
        "wrap_schedule": "forward_backward",
    },
}
"""Object that integration gives -> its methods and their parameters."""
COMMANDS = "convert env examples plan prepare-data profile report sensitivity summary watch"


def test_exports() -> None:
    assert sorted(sparsebalance_megatron.__all__) == sorted(EXPORTS)
    assert [name for name in EXPORTS if not hasattr(sparsebalance_megatron, name)] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+", sparsebalance_megatron.__version__)


def test_integration() -> None:
    assert sorted(integration.__all__) == sorted({*INTEGRATION, *HANDLES, "ModelShape"})
    for name, parameters in INTEGRATION.items():
        assert [*signature(getattr(integration, name)).parameters] == parameters.split(), name


@pytest.mark.parametrize("handle", HANDLES)
def test_methods_of_handles(handle: str) -> None:
    methods = getmembers(getattr(integration, handle), isfunction)
    assert {
        name: " ".join([*signature(method).parameters][1:])
        for name, method in methods
        if not name.startswith("_")
    } == HANDLES[handle]


def test_commands() -> None:
    assert set(cli.COMMANDS) == set(COMMANDS.split())


def test_generated_pages_are_up_to_date() -> None:
    made = {
        name: runpy.run_path(str(ROOT / f"scripts/generate_{name}.py"))
        for name in ("flags", "commands", "support")
    }
    pages = {
        ROOT / f"docs/{name.upper()}.md": made[name]["page"]() for name in ("flags", "commands")
    }
    for path, page in (pages | made["support"]["pages"]()).items():
        assert path.read_text("utf-8") == page, f"{path}: run scripts/generate_*.py"


def test_every_error_is_explained() -> None:
    """In docs/TROUBLESHOOTING.md; those with an underscore reach nobody."""
    page = (ROOT / "docs/TROUBLESHOOTING.md").read_text("utf-8")
    sources = (path.read_text("utf-8") for path in (ROOT / "sparsebalance_megatron").rglob("*.py"))
    errors = {
        name for source in sources for name in re.findall(r"^class ([A-Z]\w*Error)\(", source, re.M)
    }
    assert len(errors) > 15
    assert [name for name in sorted(errors) if f"`{name}`" not in page] == []
