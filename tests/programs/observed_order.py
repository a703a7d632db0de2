# SPDX-License-Identifier: Apache-2.0
"""The entry point, writing the order in which Megatron's schedule calls its compute timers."""

import json
import os
from pathlib import Path

from sparsebalance_megatron.megatron.timing import FORWARD_TIMER, MicroBatchRecorder
from sparsebalance_megatron.pretrain_gpt import main

EVENTS: list[tuple[str, int, int]] = []


def observe(recorder: type[MicroBatchRecorder]) -> None:
    stop, begin_step = recorder.stop, recorder.begin_step

    def observed_stop(self: MicroBatchRecorder, timer_name: str) -> None:
        if timer_name == FORWARD_TIMER:
            EVENTS.append(("forward", *self._bound[:2]))
        elif timer_name == "backward-compute":
            EVENTS.append(("backward", -1, -1))
        stop(self, timer_name)

    def observed_begin_step(self: MicroBatchRecorder) -> None:
        if EVENTS:
            rank = os.environ["RANK"]
            Path(os.environ["ORDER_DIRECTORY"], f"rank{rank}.json").write_text(json.dumps(EVENTS))
        EVENTS.clear()
        begin_step(self)

    recorder.stop, recorder.begin_step = observed_stop, observed_begin_step


if __name__ == "__main__":
    observe(MicroBatchRecorder)
    main()
