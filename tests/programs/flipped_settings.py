# SPDX-License-Identifier: Apache-2.0
"""Flips every argument that is a field of Megatron's ``TransformerConfig``, one at a time.

    python flipped_settings.py HF_DIR MORE

Prints a JSON object, arguments -> what became of them: ``refused`` with what ``check_trained``
says, ``difference`` with the largest difference of logits in float64 between the model that
config.json describes and the one of the arguments, or ``unbuildable`` with the reason. ``MORE`` is
a JSON list of further arguments, flipped together.
"""

import contextlib
import dataclasses
import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparsebalance_megatron.megatron import cpu

cpu.install()

from megatron.core.transformer import TransformerConfig  # noqa: E402

from sparsebalance_megatron.convert import megatron_model  # noqa: E402
from sparsebalance_megatron.convert.hf_config import Decoder, read_config  # noqa: E402
from sparsebalance_megatron.errors import ConvertError  # noqa: E402
from sparsebalance_megatron.megatron.compat import model_settings  # noqa: E402
from sparsebalance_megatron.megatron.single_process import start_single_process  # noqa: E402

TOKENS = torch.arange(24)[None] % 17


def main(directory: Path, more: list[dict[str, Any]]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        model = read_config(directory)
        args = megatron_model.parse_model_flags(model, (), dtype=torch.float32)
        start_single_process(args.seed, torch.device("cpu"))
        described = built(model, args)
        weights = described.state_dict()
        for value in weights.values():
            if value is not None and value.is_floating_point():
                # So small that the epsilon of a norm shows.
                torch.nn.init.normal_(value, std=0.05)
        expected = logits(described)
        results = {
            json.dumps(changes): outcome(model, args, changes, weights, expected)
            for changes in (*flips(args), *more)
        }
    print(f"\n{json.dumps(results)}")


def flips(args: Namespace) -> Iterator[dict[str, Any]]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in sorted(known & model_settings(args).keys() & vars(args).keys()):
        yield {name: other(getattr(args, name))}


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 1.5 * value + 0.25
        case list():
            return [*value, "another"]
        case None:
            return 2
    return "another"


def outcome(
    model: Decoder,
    args: Namespace,
    changes: dict[str, Any],
    weights: dict[str, Any],
    expected: torch.Tensor,
) -> dict[str, Any]:
    changed = Namespace(**vars(args) | changes)
    try:
        megatron_model.check_trained(changed, args)
    except ConvertError as error:
        return {"refused": str(error)}
    try:
        flipped = built(model, changed)
        flipped.load_state_dict(weights)
        return {"difference": (logits(flipped) - expected).abs().max().item()}
    except Exception as error:
        return {"unbuildable": f"{type(error).__name__}: {error}"[:300]}


def built(model: Decoder, args: Namespace) -> Any:
    return megatron_model.build_model(model, args).double()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool).triu(1)
    return model(TOKENS, torch.arange(TOKENS.shape[1])[None], mask)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
