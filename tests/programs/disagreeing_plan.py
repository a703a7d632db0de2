# SPDX-License-Identifier: Apache-2.0
"""The entry point with cp_sizes drawn by lot, by another lot on rank 1 from the third step on.

Start with ``--sparse-balance-device cpu``.
"""

import os
import runpy
from pathlib import Path

drawing = runpy.run_path(str(Path(__file__).with_name("shared_micro_batches.py")))


def plan_with_own_lot(step, inputs):
    seed = step + 1000 if step >= 2 and os.environ["RANK"] == "1" else step
    return drawing["replace"](drawing["plan_with_drawn_cp_sizes"](seed, inputs), step=step)


if __name__ == "__main__":
    drawing["step_planner"].plan_step = plan_with_own_lot
    drawing["main"]()
