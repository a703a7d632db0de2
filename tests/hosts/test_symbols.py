# SPDX-License-Identifier: Apache-2.0
"""What adapters touch stands in the source of others, where a checkout is given.

``pytest tests/hosts/test_symbols.py --hosts DIR`` with checkouts DIR/slime, DIR/verl,
DIR/Megatron-Bridge, DIR/mcore-bridge and DIR/ms-swift; git's bare
directories serve as well. Of frameworks that are installed (``pip install --no-deps`` will do) the
release is looked at too; nothing of it is imported.
"""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

SYMBOLS = {
    "slime": {
        "slime/ray/rollout.py": (
            "from slime.utils.dp_schedule import build_dp_schedule",
            "partitions, micro_batch_indices, num_microbatches, global_batch_sizes = ",
            "            self.train_parallel_config,\n            total_lengths,\n",
            "global_batch_size=self.args.global_batch_size,",
            'rollout_indices=data["rollout_ids"],',
            'rollout_data["num_microbatches"] = num_microbatches',
        ),
        "slime/backends/megatron_utils/data.py": (
            "self.rollout_data = rollout_data",
            "self.micro_batch_indices = micro_batch_indices",
            "self.offset = 0",
            'batch["packed_seq_params"] = packed_seq_params',
        ),
        "slime/backends/megatron_utils/model.py": (
            "get_batch(\n            data_iterator,",
            '"advantages",',
            "custom_before_train_step_hook(args, rollout_id, step_id, model, optimizer,",
            "custom_before_log_prob_hook(args, model, store_prefix)",
        ),
        "slime/backends/megatron_utils/model_provider.py": (
            "result = transformer_layer_spec(args, config, vp_stage)",
        ),
        "slime/backends/megatron_utils/initialize.py": ("custom_init(args)",),
        "slime/utils/data.py": ('rollout_data["total_lengths"] = [total_lengths[i] for i in part',),
        "slime/utils/arguments.py": ("if args.custom_config_path:",),
    },
    "verl": {
        "verl/__init__.py": ('os.getenv("VERL_USE_EXTERNAL_MODULES", "")',),
        "verl/workers/engine/base.py": ("def register(",),
        "verl/workers/engine/utils.py": ("def prepare_micro_batches(",),
        "verl/workers/engine/megatron/transformer_impl.py": (
            "postprocess_batch_func, prepare_micro_batches\n",
            "class MegatronEngineWithLMHead(MegatronEngine):",
            "def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_",
            "micro_batches, indices = prepare_micro_batches(",
            "self.engine_config.override_transformer_config}",
            "def get_data_parallel_rank(self):",
            "self.provider = provider",
            "model=self.module,",
        ),
    },
    "Megatron-Bridge": {
        "src/megatron/bridge/models/gpt_provider.py": (
            "transformer_layer_spec = transformer_layer_spec(self, vp_stage=vp_stage)",
            "if self.attention_backend == AttnBackend.local:",
        ),
        "src/megatron/bridge/training/gpt_step.py": (
            "def forward_step(\n    state: GlobalState, data_iterator: Iterable, model: GPTModel,",
            'forward_args["packed_seq_params"] = get_packed_seq_params(',
            "output_tensor = model(**forward_args)",
            '"cu_seqlens_q_padded"',
            '_LEGACY_PACKED_SEQ_DEVICE_KEYS = ("cu_seqlens",',
        ),
        "src/megatron/bridge/training/callbacks.py": (
            "class Callback:",
            "def on_train_step_end(self, context",
            "user_state: dict",
        ),
    },
    "mcore-bridge": {
        "src/mcore_bridge/model/register.py": (
            "class ModelLoader:",
            "self.config = config",
            "def get_transformer_layer_spec(self, vp_stage: Optional[int] = None):",
        ),
        "src/mcore_bridge/config/model_config.py": ("padded_vocab_size",),
    },
    "ms-swift": {
        "swift/megatron/trainers/base.py": (
            "def train_step(self, train_data_iterator):",
            "data_iterator = self._replace_data_iterator(train_data_iterator)",
            "def get_batch(self, data_iterator, vp_stage=None):",
            "num_microbatches=args.num_microbatches,",
            "model=self.wrapped_models,",
        ),
        "swift/megatron/trainers/trainer.py": (
            "class MegatronTrainer(BaseMegatronTrainer):",
            "data = self.get_batch(data_iterator, vp_stage)",
            "output_tensor = model(**data)",
            "packed_seq_params = data.get('packed_seq_params')",
        ),
    },
}
"""Framework -> file -> what stands in it."""

RELEASES = {
    "verl": "verl",
    "Megatron-Bridge": "megatron-bridge",
    "mcore-bridge": "mcore-bridge",
    "ms-swift": "ms-swift",
}
"""Framework -> its package. The one named slime is another project."""


@pytest.mark.parametrize("framework", SYMBOLS)
def test_what_is_touched_exists(framework: str, request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--hosts")
    if folder is None or not Path(folder, framework).exists():
        pytest.skip(f"give --hosts DIR with a checkout DIR/{framework} to look names up in it")
    assert missing_in(Path(folder, framework), framework) == []


@pytest.mark.parametrize("framework", RELEASES)
def test_what_is_touched_exists_in_the_installed_release(framework: str) -> None:
    try:
        release = distribution(RELEASES[framework])
    except PackageNotFoundError:
        pytest.skip(f"{RELEASES[framework]} is not installed: its release is not looked at")
    assert missing_in(Path(str(release.locate_file(""))), framework) == []


def missing_in(root: Path, framework: str) -> list[tuple[str, str]]:
    """(file, text) of what an adapter touches and the framework in ``root`` does not have."""
    return [
        (path, text)
        for path, texts in SYMBOLS[framework].items()
        for text in texts
        if text not in _source(root, path)
    ]


def _source(checkout: Path, path: str) -> str:
    for file in (checkout / path, checkout / path.removeprefix("src/")):
        if file.exists():
            return file.read_text("utf-8")
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
