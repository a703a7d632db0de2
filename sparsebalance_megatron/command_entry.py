# SPDX-License-Identifier: Apache-2.0
"""How every command ends: mistakes, signals and full disks in one line each.

- A ValueError of this package, a package that is not installed, an OSError of a file, a full disk,
  a deleted working directory, a closed standard output: status 2, and what to mend.
- Whoever reads has read enough, as ``head`` does: status 141, and nothing.
- Ctrl-C, SIGTERM and SIGHUP: status 128 and the signal's number, once what was begun is removed.
- Anything else is a bug and keeps its traceback.
"""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sparsebalance_megatron.text_table import one_line

_PACKAGE = "sparsebalance_megatron"
_INTERRUPTED = 128 + signal.SIGINT
_CLOSED_PIPE = 128 + signal.SIGPIPE
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asks the program to end; what cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def mistake_in(error: Exception) -> str | None:
    """What a user can mend: a ValueError of this package, or a package that is not installed; None
    of a bug."""
    if isinstance(error, ModuleNotFoundError):
        from sparsebalance_megatron.supported import what_is_missing

        return what_is_missing(error)
    is_own = type(error).__module__.partition(".")[0] == _PACKAGE
    return str(error) if is_own and isinstance(error, ValueError) else None


def ends_in_one_line(
    program: str,
    run: Callable[[], int],
    is_mistake: Callable[[BaseException], bool] = lambda error: False,
) -> int:
    """The exit status of ``run``, after one line on standard error if it failed.

    ``is_mistake`` tells of other errors that a user can mend by what their text says.
    """
    if sys.stdout is None:
        return _refused(program, "standard output is closed; open it, for instance to /dev/null")
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A character that the terminal's encoding lacks, or a file's name that is no text.
            sys.stdout.reconfigure(errors="backslashreplace")
        with _ending_signals():
            try:
                return run()
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return _CLOSED_PIPE
    except Ended as ended:
        return _refused(program, f"ended by {ended}", ended.status)
    except KeyboardInterrupt:
        return _refused(program, "interrupted", _INTERRUPTED)
    except Exception as error:
        reason = _os_error_text(error) if isinstance(error, OSError) else mistake_in(error)
        if is_mistake(error):
            reason = str(error)
        if not reason:
            raise
        return _refused(program, reason)


def _os_error_text(error: OSError) -> str:
    """What cannot be used and why; nothing for what no user can mend."""
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return "the working directory is gone; change into another"
    if error.errno not in (*_FULL_DISK, errno.EBADF):
        return ""
    _discard_output()
    return f"the output cannot be written: {error.strerror}; write elsewhere"


def _discard_output() -> None:
    """Drop what is still buffered, which the interpreter would write again at its end."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Inside, signals that end a program raise :class:`Ended` in this process."""
    process_id = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process_id:
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Programs started with nohup leave the signal alone.
    replaced = [each for each in _ENDING_SIGNALS if signal.getsignal(each) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        replaced = []
    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _refused(program: str, reason: str, status: int = 2) -> int:
    """The status, after one line on standard error, where that can be written."""
    prefix = "error: " if status == 2 else ""
    with suppress(OSError):
        print(f"{program}: {prefix}{one_line(reason)}", file=sys.stderr)
    return status
