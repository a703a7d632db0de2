# SPDX-License-Identifier: Apache-2.0
"""What a patched script of Megatron-LM asks of the plugin, with its flag and without."""

from argparse import ArgumentParser, Namespace

import pytest

from sparsebalance_megatron import integration


def test_without_the_flag_nothing_is_asked_and_no_default_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--sparse-balance-block-size", "64"])
    assert not integration.is_enabled(Namespace())

    def script_flags(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--dataloader-type", default=None)
        return parser

    parser = integration.arguments_provider(script_flags)(ArgumentParser())
    args = parser.parse_args(["--sparse-balance-block-size", "64"])
    assert args.dataloader_type is None
    assert args.sparse_balance is False


def test_with_the_flag_defaults_change_and_mistakes_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sparse-balance", "--data-path", "prefix", "--lr", "1e-5"]
    flags += ["--train-iters", "10", "--eval-interval", "1000", "--seq-length", "256"]
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags])
    parser = ArgumentParser()
    parser.add_argument("--dataloader-type", default=None)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--lr", type=float)
    for name in ("--train-iters", "--eval-interval", "--seq-length"):
        parser.add_argument(name, type=int)
    args = integration.arguments_provider()(parser).parse_args(flags)
    assert args.dataloader_type == "external"
    assert integration.is_enabled(args)
    args.sparse_balance_device = "cpu"
    for ask, arguments, message in (
        (integration.is_enabled, Namespace(), "--yaml-cfg"),
        (integration.training_hooks, args, "--sparse-balance-device cpu"),
    ):
        with pytest.raises(SystemExit) as end:
            ask(arguments)
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sparse balance: error: ")
        assert message in line
