# SPDX-License-Identifier: Apache-2.0
"""Parses command lines as Megatron with the plugin's flags does; an unknown flag is an error.

parse_flags.py '[["where it stands", ["--flag", "value"]]]'
"""

import argparse
import json
import sys

from sparsebalance_megatron.megatron import cpu

cpu.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_sparse_balance_args(add_megatron_arguments(parser))
    for place, words in json.loads(sys.argv[1]):
        _, unknown = parser.parse_known_args(words)
        assert not unknown, (place, unknown)
