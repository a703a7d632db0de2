# SPDX-License-Identifier: Apache-2.0
"""The ``sparse-balance`` console tool.

A subcommand is a module with ``add_flags(parser)`` and ``run(arguments) -> int``, whose errors of
this package become a line for the user. Only the chosen one is imported, so
``sparse-balance --help`` needs neither torch nor Megatron.
What follows ``--`` on the command line arrives, unread, as the list ``arguments.passed_on``.
"""

try:
    import argparse
    import importlib
    import sys
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

    from sparsebalance_megatron import __version__
    from sparsebalance_megatron.command_entry import ends_in_one_line
    from sparsebalance_megatron.errors import nearest, with_nearest
    from sparsebalance_megatron.text_table import one_line
except KeyboardInterrupt:
    # Before main can say so.
    raise SystemExit(130) from None

COMMANDS = {
    "prepare-data": "tokenise documents into Megatron's .bin and .idx files",
    "plan": "predict a job's time and memory before any GPU is used, and compare its flags",
    "profile": "measure a model's layers on this machine and write a cost table",
    "sensitivity": "find the layers that need many blocks, and write their sensitivities",
    "convert": "turn Hugging Face weights into a Megatron checkpoint, and back",
    "summary": "compare the step logs of two runs",
    "report": "show a run's logs as one HTML page",
    "watch": "follow a run in progress in the terminal",
    "env": "show versions and devices, and check attention on them",
    "examples": "show where the example scripts and patches are, or copy them",
}
"""Subcommand to its line of help; its module has the same name, with underscores."""

TAKES_FLAGS_AFTER_DASHES = frozenset({"convert", "plan", "profile", "sensitivity"})
"""Subcommands that hand what follows ``--`` to Megatron's own parser."""


class HelpFormatter(argparse.HelpFormatter):
    """Ends the help of a flag with its default, unless the help already speaks of one.

    Switches, and flags whose default is None or empty, which they explain themselves, get none.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        says_nothing = action.default in (None, False, (), [], argparse.SUPPRESS)
        if says_nothing or not action.option_strings or "default:" in text:
            return action.help
        return f"{text} (default: %(default)s)".lstrip()


class ParagraphsHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description as they are written."""


class _Parser(argparse.ArgumentParser):
    """Its errors are one line each, whatever words they repeat."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status, see :mod:`..command_entry`."""

    def run() -> int:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return int(_module(arguments.command).run(arguments))

    return ends_in_one_line("sparse-balance", run)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The chosen subcommand's flags, with ``command`` and ``passed_on``. Exits on wrong usage."""
    words = [*argv, "--"]
    end = words.index("--")
    own, passed_on = words[:end], words[end + 1 : -1]
    chosen = next((word for word in own if not word.startswith("-")), None)
    parser = _Parser(
        prog="sparse-balance",
        description="Tools around training with --sparse-balance.",
        epilog="`sparse-balance COMMAND --help` lists a command's flags.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    if chosen is not None and chosen not in COMMANDS:
        parser.error(f"{chosen}: no command{nearest(chosen, COMMANDS)}; --help lists them")
    flags: Iterable[str] = ()
    for name, help_line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, formatter_class=HelpFormatter)
        if name == chosen:
            _module(name).add_flags(subparser)
            flags = subparser._option_string_actions
            if name in TAKES_FLAGS_AFTER_DASHES:
                usage = subparser.format_usage().removeprefix("usage: ").rstrip()
                subparser.usage = f"{usage} -- <flags of training>"
    for word in own:
        # argparse of Python 3.12 ends in a traceback at a value of dashes.
        if "\0" in word or word.endswith("=--"):
            what = "a zero byte" if "\0" in word else "--"
            parser.error(f"{word}: {what} is no value")
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(with_nearest(f"unrecognized arguments: {' '.join(unknown)}", flags))
    if passed_on and arguments.command not in TAKES_FLAGS_AFTER_DASHES:
        parser.error(f"{arguments.command} takes no flags after --: drop {' '.join(passed_on)}")
    arguments.passed_on = passed_on
    return arguments


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one subcommand, without what leads to it."""
    parser = argparse.ArgumentParser(
        prog=f"sparse-balance {command}", formatter_class=HelpFormatter
    )
    _module(command).add_flags(parser)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
