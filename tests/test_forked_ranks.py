# SPDX-License-Identifier: Apache-2.0
"""Forked ranks behave as programs that torchrun starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import forked_ranks
import pytest
from forked_ranks import free_port, run_alone, run_ranks
from harness import python_environment

pytestmark = pytest.mark.distributed


def _run(tmp_path: Path, text: str, *, ranks: int = 2, timeout_s: float = 60.0) -> int | None:
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return run_ranks(
        ranks,
        (str(program), "--flag"),
        environment=python_environment(),
        master_port=free_port(),
        output=tmp_path / "output",
        timeout_s=timeout_s,
    )


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that connections get are not, which may take it before a rank listens."""
    first = free_port()
    assert first < 32_768
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        monkeypatch.setattr(forked_ranks, "_PORTS", range(first, first + 1))
        with pytest.raises(OSError, match=f"from {first} to {first} is free"):
            free_port()
    assert free_port() == first


def test_every_rank_is_a_fresh_program_in_its_place(tmp_path: Path) -> None:
    text = (
        "assert __name__ == '__main__' and sys.argv[1:] == ['--flag']\n"
        "assert 'megatron.core' in sys.modules\n"
        "assert not {'megatron.training', 'sparsebalance_megatron'} & {*sys.modules}\n"
        "assert sys.path[0] == os.path.dirname(sys.argv[0])\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "import torch\n"
        "assert not torch.cuda.is_available()\n"
        "torch.distributed.init_process_group('gloo')\n"
        "total = torch.tensor([1.0 + rank])\n"
        "torch.distributed.all_reduce(total)\n"
        "print('rank', rank, 'of', torch.distributed.get_world_size(), float(total))\n"
        "import atexit\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "atexit.register(lambda: print('rank', rank, 'ends', *done))\n"
        "done = []\n"
        "ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.5), done.append('late')))\n"
        "torch.distributed.destroy_process_group()"
    )
    assert _run(tmp_path, text, ranks=3) == 0, (tmp_path / "output").read_text()
    lines = set((tmp_path / "output").read_text().splitlines())
    assert lines >= {f"rank {rank} of 3 6.0" for rank in range(3)}
    assert lines >= {f"rank {rank} ends late" for rank in range(3)}


@pytest.mark.parametrize(
    ("ending", "exit_code", "printed"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit('what is wrong')", 1, "what is wrong\n"),
        ("raise ValueError('what is wrong')", 1, "ValueError: what is wrong\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_the_first_failure_ends_the_others(
    ending: str, exit_code: int, printed: str, tmp_path: Path
) -> None:
    begin_s = time.monotonic()
    text = f"if rank == 1:\n    {ending}\ntime.sleep(60)\nprint('too late')"
    assert _run(tmp_path, text) == exit_code
    assert time.monotonic() - begin_s < 50
    output = (tmp_path / "output").read_text()
    assert output.endswith(printed)
    assert "too late" not in output


def test_ranks_end_when_the_process_that_runs_them_is_killed(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    launcher = (
        "import os\nfrom pathlib import Path\nfrom forked_ranks import run_ranks\n"
        f"run_ranks(1, [{str(rank)!r}], environment=dict(os.environ), master_port=1, "
        f"output=Path({str(tmp_path / 'output')!r}), timeout_s=60, imports=())"
    )
    benchmarks = str(Path(__file__).parents[1] / "benchmarks")
    environment = {**python_environment(), "PYTHONPATH": benchmarks}
    with subprocess.Popen([sys.executable, "-c", launcher], env=environment) as process:
        assert _comes_true(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.kill()
    pid = int((tmp_path / "pid").read_text())
    assert _comes_true(lambda: not _runs(pid)), "the rank runs on"


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _comes_true(condition: Callable[[], object], limit_s: float = 30.0) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_run_that_does_not_end_says_where_it_stands_and_is_ended(tmp_path: Path) -> None:
    text = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    assert _run(tmp_path, text, timeout_s=3.0) is None
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
    stacks = (tmp_path / "output").read_text()
    assert stacks.count("most recent call first") >= 2
    assert stacks.count('program.py", line 4 in <module>') == 2


def test_a_machine_that_stood_still_has_not_used_up_the_time_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_s = time.monotonic()

    def jumps_s() -> float:
        now_s = time.monotonic()
        return now_s if now_s - begun_s < 1.0 else now_s + 1000.0

    clock = SimpleNamespace(monotonic=jumps_s, sleep=time.sleep)
    monkeypatch.setattr(forked_ranks, "time", clock)
    assert _run(tmp_path, "time.sleep(3.0)", timeout_s=20.0) == 0


def test_a_program_alone_prints_into_two_streams_and_has_no_place(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "assert 'RANK' not in os.environ and os.getcwd() == sys.argv[1]\n"
        "print('result')\n"
        "sys.exit('what is wrong')\n"
    )
    done = run_alone(
        (str(program), str(tmp_path)),
        environment=python_environment(),
        folder=tmp_path,
        timeout_s=60.0,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "result\n", "what is wrong\n")
