# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance completion``: a script that completes commands, flags and choices in a shell."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from sparsebalance_megatron import cli

_SCRIPT = """\
# Completes sparse-balance; `sparse-balance completion {name}` wrote it.
{prologue}_sparse_balance() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} $previous" in
{choices}
    esac
    if [[ "$current" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{flags}
        esac
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{words}
    esac
    COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _sparse_balance sparse-balance
"""
_PROLOGUE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_REPLY = 'COMPREPLY=($(compgen -W "{words}" -- "$current"))'


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``completion``."""
    parser.description = (
        'Print a completion script. In bash: eval "$(sparse-balance completion bash)"; in zsh, '
        'after compinit: eval "$(sparse-balance completion zsh)".'
    )
    parser.add_argument("shell", choices=tuple(_PROLOGUE))


def run(arguments: Namespace) -> int:
    """Print the script."""
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script of a shell, "bash" or "zsh".

    Flags, choices and subcommands are read off the real parsers, so it is as old as the installed
    version: a shell that evaluates it at start-up is never behind.
    """
    parsers = {name: cli.parser_of(name) for name in cli.COMMANDS}
    return _SCRIPT.format(
        name=shell,
        prologue=_PROLOGUE[shell],
        commands=" ".join(cli.COMMANDS),
        choices="\n".join(_choices(parsers)),
        flags="\n".join(
            f"            {name}) {_REPLY.format(words=' '.join(_flags(parser)))} ;;"
            for name, parser in parsers.items()
        ),
        words="\n".join(
            f"        {name}) {_REPLY.format(words=' '.join(words))} ;;"
            for name, parser in parsers.items()
            if (words := _positional_choices(parser))
        ),
    )


def _all_actions(parser: ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and of the parsers below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _all_actions(below)


def _flags(parser: ArgumentParser) -> list[str]:
    """The long flags, each once."""
    flags = (flag for action in _all_actions(parser) for flag in action.option_strings)
    return list(dict.fromkeys(flag for flag in flags if flag.startswith("--")))


def _positional_choices(parser: ArgumentParser) -> list[str]:
    return [
        str(choice)
        for action in parser._actions
        if not action.option_strings
        for choice in action.choices or ()
    ]


def _choices(parsers: dict[str, ArgumentParser]) -> Iterator[str]:
    """A line for every flag of every command that takes one of a few words."""
    for name, parser in parsers.items():
        for action in _all_actions(parser):
            if action.option_strings and action.choices:
                reply = _REPLY.format(words=" ".join(map(str, action.choices)))
                places = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                yield f"        {places}) {reply}; return ;;"
