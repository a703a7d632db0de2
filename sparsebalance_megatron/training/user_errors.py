# SPDX-License-Identifier: Apache-2.0
"""How a script ends at what its user can mend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGE = __name__.partition(".")[0]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """At a ValueError of this package, end the process with one line and status 2.

    Flags, data and cost tables raise those, and argparse ends like this; anything else keeps its
    traceback.
    """
    try:
        yield
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != _PACKAGE:
            raise
        print(f"sparse balance: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
