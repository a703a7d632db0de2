# SPDX-License-Identifier: Apache-2.0
"""A rank of a soak: the entry point, with what the first argument asks it to suffer.

The argument is a JSON object, all of it optional: ``seed``; ``delay``, the share of micro-batches
before which this rank sleeps; ``delay_s``, the longest such sleep; ``read_s``, the longest sleep
before a row is read, as on a slow disk; ``file_megabytes``, which no file may outgrow, as on a
full one.
"""

import json
import os
import random
import resource
import sys
import time
from functools import wraps

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator  # noqa: E402


def suffer(wanted: dict[str, float]) -> None:
    generator = random.Random(f"{wanted.get('seed', 0)}:{os.environ['RANK']}")
    share, longest_s = wanted.get("delay", 0.0), wanted.get("delay_s", 0.0)
    read_s = wanted.get("read_s", 0.0)

    def before(owner: type, name: str, act: object) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def late(*arguments, **keywords):
            act()
            return function(*arguments, **keywords)

        setattr(owner, name, late)

    if share:
        before(
            MicroBatchIterator,
            "__next__",
            lambda: generator.random() < share and time.sleep(generator.uniform(0, longest_s)),
        )
    if read_s:
        before(MicroBatchIterator, "_read", lambda: time.sleep(generator.uniform(0, read_s)))
    if size := wanted.get("file_megabytes"):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * 1e6), hard))


if __name__ == "__main__":
    suffer(json.loads(sys.argv.pop(1)))
    main()
