# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance prepare-data``: documents to Megatron's ``.bin`` and ``.idx`` files."""

import argparse
from pathlib import Path
from typing import Any

from sparsebalance_megatron.cli import ParagraphsHelpFormatter
from sparsebalance_megatron.data.documents import LOSS_MASK_SUFFIX
from sparsebalance_megatron.data.prepare import counts_text, prepare
from sparsebalance_megatron.data.records import RecordFiles
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import UnreadableFileError, parse_json

_DESCRIPTION = """\
Tokenise documents and write them as PREFIX.bin and PREFIX.idx, which Megatron reads with
--data-path PREFIX, and a summary as PREFIX.json.

A record is {"text": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}, the latter
with "tools" where the assistant may call some. Conversations are rendered with the tokenizer's chat
template, or as lines "role: content" where it has none. Only the assistant's turns are trained on:
PREFIX_loss_mask.bin and .idx say which tokens count.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.formatter_class = ParagraphsHelpFormatter
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help="files of JSON lines, plain, .gz or .zst, or .parquet, in order",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="a HuggingFace tokenizer: directory or model name",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path to write to")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-sequence token, unless it ends so",
    )
    parser.add_argument(
        "--prepend-bos",
        action="store_true",
        help="begin texts, not conversations, with the token that the tokenizer begins texts with",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=_object,
        default={},
        metavar="JSON",
        help="arguments for the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--on-bad-record",
        choices=("stop", "skip"),
        default="stop",
        help="a record that cannot be used stops the run, or is left out and counted",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data set of the same prefix"
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = parse_json(text, dict[str, Any])
    except UnreadableFileError as error:
        raise argparse.ArgumentTypeError(f"no JSON object: {error}") from error
    return value


def run(arguments: argparse.Namespace) -> int:
    try:
        summary = prepare(
            RecordFiles(arguments.input),
            arguments.output_prefix,
            tokenizer_name=arguments.tokenizer,
            append_eod=arguments.append_eod,
            prepend_bos=arguments.prepend_bos,
            template_arguments=arguments.chat_template_kwargs,
            skip_bad_records=arguments.on_bad_record == "skip",
            overwrite=arguments.overwrite,
        )
    except OSError as error:
        path = error.filename or f"--output-prefix {arguments.output_prefix}"
        raise DataError(f"{path}: {error.strerror or error}") from error
    print(describe(summary, arguments.output_prefix))
    return 0


def describe(summary: dict[str, Any], prefix: str) -> str:
    lengths = ", ".join(f"{name} {value:,}" for name, value in summary["document_tokens"].items())
    lines = [
        f"wrote {prefix}.bin and .idx: {summary['documents']:,} documents, "
        f"{summary['tokens']:,} tokens (per document: {lengths})",
        f"tokenizer: {summary['tokenizer']['path']} "
        f"({summary['tokenizer']['vocab_size']:,} tokens)",
    ]
    if summary["loss_mask"]:
        lines.append(
            f"loss on {summary['loss_tokens']:,} tokens, see {prefix}{LOSS_MASK_SUFFIX}.bin"
        )
    lines += [f"note: {note}" for note in summary["notes"]]
    lines.append(f"records left out: {counts_text(summary['skipped'])}")
    return "\n".join(lines)
