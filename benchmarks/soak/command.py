# SPDX-License-Identifier: Apache-2.0
"""Two runs of the same steps, one left alone and one disturbed, and what differs.

The disturbed run is cut into attempts. Each ends by SIGKILL on a random rank after a random number
of steps (exponential, --kill-every on average), unless it fails before. In all of them ranks are
delayed at random; in some the disk is full, so that no checkpoint can be written, in some it is
slow. Every attempt resumes from the last checkpoint. Calibration is off, so that plans do not
depend on time, and loss, plan and coverage of every step must be those of the run left alone, bit
for bit.

Four ranks over gloo (two data-parallel, two pipeline stages) with evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from soak.attempt import Attempt, run
from soak.picture import draw
from soak.setup import RANKS, flags, write_documents

_COMPARED = ("lm_loss", "predicted", "coverage", "tokens")
_DELAYS = {"delay": 0.05, "delay_s": 0.2}
_FULL_DISK_MEGABYTES = 3.0
"""Less than a file of the checkpoint; more than what a run logs."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        result = soak(directory, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(result, options.json.with_suffix(".svg"))
    print(json.dumps({key: value for key, value in result.items() if key != "attempts"}, indent=1))
    return 0 if result["passed"] else 1


def soak(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both runs; what was found."""
    data = write_documents(directory / "train", seed=options.seed)
    alone = _one(directory / "alone", data, options, kill_at=None, disturbance={}, name="none")
    attempts = _disturbed(directory / "disturbed", data, options)
    expected = _steps(directory / "alone")
    found = _steps(directory / "disturbed")
    differing = _differences(expected, found)
    times_logged = Counter(record["iteration"] for record in found)
    missing = sorted(set(range(1, options.steps + 1)) - set(times_logged))
    replayed = sum(
        max(0, earlier.last_step - later.first_step)
        for earlier, later in itertools.pairwise(attempts)
    )
    result = {
        "machine": {"cpu": platform.processor(), "torch": torch.__version__},
        "steps": options.steps,
        "seed": options.seed,
        "seconds": {"alone": alone.seconds, "disturbed": sum(a.seconds for a in attempts)},
        "ended": dict(Counter(f"{a.disturbance}: {a.ended}" for a in attempts)),
        "steps_that_differ": differing,
        "steps_missing": missing,
        "steps_logged_more_often_than_run": sum(times_logged.values()) - options.steps - replayed,
        "steps_run_again": replayed,
        "orphans": sum(a.orphans for a in attempts) + alone.orphans,
        "growth": _growth(alone),
        "attempts": [asdict(a) for a in (alone, *attempts)],
    }
    result["passed"] = (
        alone.ended == "finished"
        and attempts[-1].ended == "finished"
        and not differing
        and not missing
        and result["steps_logged_more_often_than_run"] == 0
        and result["orphans"] == 0
        and "hung" not in {a.ended for a in attempts}
    )
    return result


def _disturbed(directory: Path, data: Path, options: argparse.Namespace) -> list[Attempt]:
    """Attempts until all steps are done; fails after more than any luck explains."""
    generator = random.Random(options.seed)
    attempts: list[Attempt] = []
    kinds = ["delays", "full disk", "slow disk"]
    while not attempts or attempts[-1].ended != "finished":
        if len(attempts) > 10 + 4 * options.steps // options.kill_every:
            raise SystemExit(f"no end after {len(attempts)} attempts; see {directory}/output")
        kind = kinds[len(attempts) % len(kinds)] if len(attempts) < 3 else generator.choice(kinds)
        wanted: dict[str, float] = {"seed": len(attempts), **_DELAYS}
        wanted |= {"file_megabytes": _FULL_DISK_MEGABYTES} if kind == "full disk" else {}
        wanted |= {"read_s": 0.2} if kind == "slow disk" else {}
        begun = _checkpoint(directory)
        steps = 1 + int(generator.expovariate(1 / options.kill_every))
        attempts.append(
            _one(
                directory,
                data,
                options,
                kill_at=begun + steps,
                disturbance=wanted,
                name=kind,
                victim=generator.randrange(RANKS),
            )
        )
        last = attempts[-1]
        print(f"{kind}: steps {last.first_step} to {last.last_step}, {last.ended}", flush=True)
    return attempts


def _one(
    directory: Path,
    data: Path,
    options: argparse.Namespace,
    *,
    kill_at: int | None,
    disturbance: Mapping[str, float],
    name: str,
    victim: int = 0,
) -> Attempt:
    directory.mkdir(parents=True, exist_ok=True)
    began = time.time()

    def logged_step() -> int:
        """Of this attempt: the log is touched when it has one."""
        path = directory / "logs" / "steps.jsonl"
        if not path.exists() or path.stat().st_mtime < began:
            return begun
        return max((record["iteration"] for record in _steps(directory)[-1:]), default=begun)

    begun = _checkpoint(directory)
    return run(
        Attempt(disturbance=name, first_step=begun),
        flags(directory, data, options.steps, options.save_every),
        ranks=RANKS,
        disturbance=disturbance,
        log=directory / "output",
        logged_step=logged_step,
        kill_at=kill_at,
        victim=victim,
        quiet_s=options.quiet_seconds,
    )


def _checkpoint(directory: Path) -> int:
    tracker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def _steps(directory: Path) -> list[dict[str, Any]]:
    path = directory / "logs" / "steps.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise
    return [record for record in records if record["type"] == "step"]


def _differences(
    expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Iterations of which any record differs, in what training computed or planned."""
    known = {record["iteration"]: record for record in expected}
    return sorted(
        {
            record["iteration"]
            for record in found
            if record["iteration"] not in known
            or any(record[name] != known[record["iteration"]][name] for name in _COMPARED)
        }
    )


def _growth(attempt: Attempt) -> dict[str, float]:
    """From the second tenth of the run left alone to its last: what grows every step shows here."""
    usage, tenth = attempt.usage, max(1, len(attempt.usage) // 10)
    if len(usage) < 3:
        return {}
    early, late = usage[tenth : 2 * tenth], usage[-tenth:]
    return {
        name: max(getattr(u, name) for u in late) - max(getattr(u, name) for u in early)
        for name in ("resident_megabytes", "threads", "open_files")
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here, and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="a dozen steps")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--kill-every", type=int, default=100, help="steps, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-seconds", type=float, default=300.0, help="without a step, an attempt hangs"
    )
    parser.add_argument("--directory", type=Path, help="keeps both runs; default: a temporary one")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.quick:
        options.steps, options.save_every, options.kill_every = 12, 3, 4
    for name in ("steps", "save_every", "kill_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    return options
