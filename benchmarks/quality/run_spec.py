# SPDX-License-Identifier: Apache-2.0
"""One run: a study's model trained in one arm from one seed. How it is named, told and flagged."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quality.arms import ARMS, Arm
from quality.tasks import STUDIES, Study

_WARM_UP_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a rank is told. Paths are text, so that it survives JSON.

    Attributes:
        steps: of training.
        share: of the held-out documents that are scored.
        data: prefix of the training documents.
        directory: where the run leaves its results.
        replay: file of executed budgets that a replaying arm takes, else None.
        ranks: processes that train: as many as the study plans for, or 1, which computes the
            micro-batches of all planned ranks as one. Losses are per token, so that the model is
            the same to rounding.
    """

    study_name: str
    arm_name: str
    seed: int
    steps: int
    share: float
    data: str
    directory: str
    replay: str | None = None
    ranks: int = 1

    @property
    def study(self) -> Study:
        return STUDIES[self.study_name]

    @property
    def arm(self) -> Arm:
        return ARMS[self.arm_name]

    @property
    def model_seed(self) -> int:
        """Seed of the initial weights, alike in all arms."""
        return 1000 + self.seed

    @property
    def folder(self) -> Path:
        return Path(self.directory)

    @property
    def readings(self) -> dict[str, int | None]:
        """What the trained model is read with: a base budget, or None for dense attention.

        "own" is that of the arm; a reading that would repeat it is left out.
        """
        arm, base = self.arm, self.arm.base_budget(self.study.base_budget)
        if arm.dense:
            return {"own": None, "sparse": base}
        return {"own": base, "dense": None}

    def write(self) -> Path:
        """For :meth:`read`, which a rank calls."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "spec.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> "RunSpec":
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def flags(self) -> list[str]:
        """Megatron's and the plugin's."""
        study, budget = self.study, self.study.base_budget
        longest = str(study.longest_tokens)
        micro_batch = study.batch_size // self.ranks
        return [
            *("--num-layers", str(study.layers), "--hidden-size", "64"),
            *("--ffn-hidden-size", "256", "--num-attention-heads", "4", "--kv-channels", "32"),
            *("--group-query-attention", "--num-query-groups", "2"),
            *("--seq-length", longest, "--max-position-embeddings", longest),
            *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
            *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
            *("--attention-dropout", "0", "--hidden-dropout", "0", "--init-method-std", "0.06"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(study.vocabulary)),
            *("--make-vocab-size-divisible-by", "1"),
            *("--micro-batch-size", str(micro_batch), "--global-batch-size", str(study.batch_size)),
            *("--train-iters", str(self.steps), "--lr", "3e-3", "--lr-decay-style", "cosine"),
            *("--lr-warmup-iters", str(min(_WARM_UP_STEPS, self.steps // 4)), "--min-lr", "0"),
            *("--adam-beta1", "0.9", "--adam-beta2", "0.95", "--weight-decay", "0"),
            *("--clip-grad", "1.0", "--seed", str(self.model_seed)),
            *("--log-interval", "20", "--eval-iters", "0", "--eval-interval", "1000000"),
            *("--data-path", self.data, "--split", "100,0,0"),
            *("--sparse-balance", "--sparse-balance-device", "cpu"),
            *("--sparse-balance-block-size", str(study.block_size)),
            *("--sparse-balance-dense-up-to", "0"),
            *("--sparse-balance-config", "calibration=off", "planning=on-demand"),
            *("--sparse-balance-log-dir", str(self.folder)),
            *self.arm.flags(budget),
        ]
