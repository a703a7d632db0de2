# SPDX-License-Identifier: Apache-2.0
"""How the commands print their help: every flag that has a default says it."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Ends the help of a flag with its default, unless the help already speaks of one.

    Switches and flags whose default is None, which every such flag explains itself, get no ending.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        says_nothing = action.default in (None, False, argparse.SUPPRESS)
        if says_nothing or not action.option_strings or "default:" in text:
            return action.help
        return f"{text} (default: %(default)s)".lstrip()


class ParagraphsHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description as they are written."""
