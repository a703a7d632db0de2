# SPDX-License-Identifier: Apache-2.0
"""Programs, forked from a process that has imported PyTorch and Megatron-Core.

A small run spends most of its time on imports. Here they are made once per test process. What
matters is as under torchrun: every rank is a process of its own, with the environment that torchrun
would give it, in which the plugin, its CPU adapter and Megatron's training loop are imported anew;
when one fails, the others are ended. Two things differ. The seed of string hashes is the same in
all ranks: runs that may not depend on it take torchrun. And Megatron-Core is imported before the
CPU adapter is installed, where it finds no GPU; it asks for one only to look for Transformer
Engine, which needs one. Programs that bring a Megatron of their own take torchrun.
"""

import atexit
import faulthandler
import functools
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

_IMPORTED_BEFOREHAND = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
    "scipy.optimize",
    "transformers.models.auto.tokenization_auto",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.tokenizers.text",
)
_REPOSITORY = Path(__file__).parents[1]
_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to connections: one of these may take a port that was free when it
was asked for, before the rank that is to listen there has started."""
_PORT_ATTEMPTS = 100
_TERMINATION_S = 30.0
"""What torchrun gives ranks to end when one has failed."""
_LOOK_S = 5.0
"""No longer than this counts as passed between two looks, so that a machine that was stopped in
between has not used up its ranks' time."""
_STACKS_S = 1.0
"""For a rank to print where it stands, which takes milliseconds."""


def run_ranks(
    ranks: int,
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    timeout_s: float,
    folder: Path | None = None,
    begun: Callable[[Sequence[int]], None] | None = None,
) -> int | None:
    """Run ``python PROGRAM...`` as all ranks of a job, in ``folder`` or this process's own.

    Args:
        environment: of every rank, whole.
        output: a file that gets what they print; after ``timeout_s`` seconds, also where every
            thread stands that has not ended.
        begun: is called with the ranks' process ids. Each is the leader of a session of its own.

    Returns:
        0, the exit code of the rank that failed first, or None after ``timeout_s`` seconds.
    """
    common = {
        **{"GROUP_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    where = folder or Path.cwd()
    return _run(program, environment, places, where, output, output, timeout_s, begun)


def run_alone(
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run ``python PROGRAM...`` in ``folder`` as one process, with no variable of torchrun.

    Raises:
        TimeoutExpired: after ``timeout_s`` seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, err = (Path(directory, name) for name in ("stdout", "stderr"))
        code = _run(program, environment, [{}], folder, out, err, timeout_s)
        stdout, stderr = (path.read_text(errors="replace") for path in (out, err))
    if code is None:
        raise subprocess.TimeoutExpired(list(program), timeout_s, stdout, stderr)
    return subprocess.CompletedProcess(list(program), code, stdout, stderr)


def cpu_environment() -> dict[str, str]:
    """For processes that run on a CPU, with a thread each: this repository comes before what
    PYTHONPATH names already."""
    paths = [str(_REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def free_port() -> int:
    """A TCP port that was free a moment ago, and is given to no connection meanwhile.

    Raises:
        OSError: none of many is free.
    """
    for port in random.SystemRandom().sample(_PORTS, _PORT_ATTEMPTS):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"none of {_PORT_ATTEMPTS} ports of {_PORTS} is free")


def _run(
    program: Sequence[str],
    environment: Mapping[str, str],
    places: Sequence[Mapping[str, str]],
    folder: Path,
    stdout: Path,
    stderr: Path,
    timeout_s: float,
    begun: Callable[[Sequence[int]], None] | None = None,
) -> int | None:
    """One process per place, which is what its environment has besides."""
    told = json.dumps(dict(environment))
    context, path = _server(told), _path(told)
    outputs = (str(stdout), str(stderr))
    for output in outputs:
        Path(output).touch()
    started = []
    for place in places:
        arguments = (list(program), {**environment, **place}, str(folder), path, outputs)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        started.append(process)
    if begun is not None:
        begun([process.pid or 0 for process in started])
    left_s, failed, running = timeout_s, None, started
    try:
        while running and failed is None and left_s > 0.0:
            looked_s, look_s = time.monotonic(), min(left_s, _LOOK_S)
            connection.wait([process.sentinel for process in running], look_s)
            left_s -= min(time.monotonic() - looked_s, look_s)
            failed = next((process.exitcode for process in started if process.exitcode), None)
            running = [process for process in running if process.exitcode is None]
        if running and failed is None:
            _print_stacks(running)
    finally:
        _end(started)
    return None if running and failed is None else failed or 0


def _print_stacks(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Ranks print theirs one after the other, so that they do not mix."""
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(_STACKS_S)


def _end(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    limit_s = time.monotonic() + _TERMINATION_S
    for process in processes:
        process.join(max(0.0, limit_s - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


@functools.cache
def _server(environment: str) -> ForkServerContext:
    """The forking process, started with the first environment, which decides how libraries load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED_BEFOREHAND))
    own = dict(os.environ)
    os.environ.update(json.loads(environment))
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
    return context


@functools.cache
def _path(environment: str) -> list[str]:
    """``sys.path`` as an interpreter starts with it, without the entry for its program."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    printed = subprocess.run(
        command, env=json.loads(environment), capture_output=True, text=True, check=True
    ).stdout
    found: list[str] = json.loads(printed)
    return found


def _end_with_parent() -> None:
    """A process that was killed ends nothing itself, and its ranks would train on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _rank(
    program: list[str],
    environment: dict[str, str],
    folder: str,
    path: list[str],
    outputs: tuple[str, str],
) -> None:
    """What ``python PROGRAM...`` does in a process of its own."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for standard, output in zip((1, 2), outputs, strict=True):
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, standard)
        os.close(descriptor)
    # Whole lines, so that those of several ranks do not mix.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1)
    try:
        if program[0] == "-m":
            sys.path[:] = [folder, *path]
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:] = [os.path.dirname(program[0]), *path]
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        # As an interpreter that ends: threads first, then what was registered.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
