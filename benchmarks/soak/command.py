# SPDX-License-Identifier: Apache-2.0
"""Two runs of the same steps, one left alone and one disturbed, and what differs.

The disturbed run is cut into attempts. Each ends by SIGKILL on a random rank after a random number
of steps (exponential, --kill-every on average), unless it fails before. In all of them ranks are
delayed at random; in some the disk is full, so that no checkpoint can be written, in some it is
slow. Every attempt resumes from the last checkpoint. Calibration is off, so that plans do not
depend on time, and loss, plan and coverage of every step must be those of the run left alone, bit
for bit. Every step of every attempt must be in the log once, and no process may be left behind, but
for one per rank that was ended, which Megatron's checkpoint writer keeps and nobody ends.
The run left alone may not grow in threads, open files or, by more than a twentieth, in memory.

Four ranks over gloo (two data-parallel, two pipeline stages) with evaluation and checkpoints;
--quick has one pipeline.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from end_to_end.command import machine

from soak.attempt import Attempt, run
from soak.log import SoakLog, differing_steps, iterations_to_log
from soak.picture import draw
from soak.setup import flags, write_documents

_DELAYS = {"delay": 0.05, "delay_s": 0.2}
_REPORTED = ("ranks", "steps", "save_every", "kill_every", "seed")
_MEMORY_GROWTH = 0.05
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
    print(f"left alone: {alone.last_step} steps, {alone.ended}", flush=True)
    attempts = _disturbed(directory / "disturbed", data, options)
    found = SoakLog(directory / "disturbed").steps()
    logged = [record["iteration"] for record in found]
    run_again = len(iterations_to_log(attempts)) - options.steps
    usage = _growth(alone)
    checks = {
        "both runs finished": (alone.ended, attempts[-1].ended) == ("finished", "finished"),
        "no attempt hung": all(a.ended != "hung" for a in attempts),
        "steps equal": not differing_steps(SoakLog(directory / "alone").steps(), found),
        "every step logged once": logged == iterations_to_log(attempts)
        and set(logged) == set(range(1, options.steps + 1)),
        "no process left behind": all(
            _leaves_nothing(a, options.ranks) for a in (alone, *attempts)
        ),
        "memory, threads and files flat": _is_flat(usage, alone),
    }
    return {
        "machine": machine("cpu"),
        "options": {name: getattr(options, name) for name in _REPORTED},
        "passed": all(checks.values()),
        "checks": checks,
        "seconds": {"alone": alone.seconds, "disturbed": sum(a.seconds for a in attempts)},
        "ended": dict(Counter(f"{a.disturbance}: {a.ended}" for a in attempts)),
        "steps_run_again": run_again,
        "growth": usage,
        "attempts": [asdict(a) for a in (alone, *attempts)],
    }


def _leaves_nothing(attempt: Attempt, ranks: int) -> bool:
    """Tell whether no process is left but the one that a killed rank's checkpoint writers talk
    to."""
    return attempt.orphans <= (0 if attempt.ended == "finished" else ranks)


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
                victim=generator.randrange(options.ranks),
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
    log = SoakLog(directory)
    begun = _checkpoint(directory)
    return run(
        Attempt(disturbance=name, first_step=begun),
        flags(directory, data, options.steps, options.save_every),
        ranks=options.ranks,
        disturbance=disturbance,
        output=directory / "output",
        logged_step=lambda: log.last_of_attempt(begun),
        kill_at=kill_at,
        victim=victim,
        quiet_s=options.quiet_seconds,
    )


def _checkpoint(directory: Path) -> int:
    tracker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def _growth(attempt: Attempt) -> dict[str, float]:
    """From the second tenth of the run left alone to its last: what grows every step shows here."""
    usage, tenth = attempt.usage, max(1, len(attempt.usage) // 10)
    if len(usage) < 20:
        return {}
    early, late = usage[tenth : 2 * tenth], usage[-tenth:]
    return {
        name: max(getattr(u, name) for u in late) - max(getattr(u, name) for u in early)
        for name in ("resident_megabytes", "threads", "open_files")
    }


def _is_flat(growth: Mapping[str, float], attempt: Attempt) -> bool:
    """Tell whether memory stays flat; a run with too few steps to tell passes."""
    if not growth:
        return True
    memory = growth["resident_megabytes"] / attempt.usage[0].resident_megabytes
    return memory <= _MEMORY_GROWTH and growth["threads"] <= 0 and growth["open_files"] <= 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here, and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="six steps of two ranks")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--kill-every", type=int, default=100, help="steps, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-seconds", type=float, default=300.0, help="without a step, an attempt hangs"
    )
    parser.add_argument("--directory", type=Path, help="keeps both runs; default: a temporary one")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    options.ranks = 2 if options.quick else 4
    if options.quick:
        # By this seed a rank is killed after step 3, then the disk is full, then it is slow.
        options.steps, options.save_every, options.kill_every, options.seed = 6, 2, 3, 5
    for name in ("steps", "save_every", "kill_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    return options
