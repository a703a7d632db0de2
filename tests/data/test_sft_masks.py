# SPDX-License-Identifier: Apache-2.0
"""Every loss weight of conversations, from JSON lines to packing, against naive reading."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from data.stored_documents import open_stored
from data.tokenizers_of_tests import train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.conversations import Layout, Turn, characters

from sparsebalance_megatron.data.packing import pack, packed_cu_seqlens
from sparsebalance_megatron.data.prepare import prepare
from sparsebalance_megatron.data.records import RecordFiles

LAYOUTS = {
    "no template": Layout(opening="ROLE: ", closing="\n"),
    "chatml": Layout(opening="<|im_start|>ROLE\n", closing="<|im_end|>\n"),
    "chatml, default system turn": Layout(
        opening="<|im_start|>ROLE\n", closing="<|im_end|>\n", default_system="You help."
    ),
    "chatml, content marked": Layout(
        opening="<|im_start|>ROLE\n", closing="<|im_end|>\n", marks_content=True
    ),
    "plain text, content stripped": Layout(
        opening="[ROLE]\n\n", closing="[end]", strips_content=True
    ),
}
Prediction = tuple[int, int, float]
"""Input token, label, and the weight of predicting that label."""

contents = st.lists(
    st.sampled_from(
        [
            *("a", "is 2", " ", "\n", "\n\n", "...", "é", "e\u0301", "你好", "🎉", "x" * 9),
            *("[end]\n", "<|im_end|>", "<|im_start|>assistant\n"),
        ]
    ),
    min_size=1,
    max_size=6,
).map("".join)
later_turns = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), contents), max_size=5
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns in any order of roles; the first is not the assistant's, some turn is."""
    first = (draw(st.sampled_from(["user", "system"])), draw(contents))
    others = draw(later_turns)
    spoken = ("assistant", draw(contents))
    position = draw(st.integers(0, len(others)))
    return [first, *others[:position], spoken, *others[position:]]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each layout, a byte-level BPE of merges over role names, blanks and line ends."""
    from tokenizers import normalizers
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizers")
    text = "user assistant system is 2\n\n... you help. xxxxxxxxx é 你好 [end]\n" * 20
    base = train_tokenizer([text], 330, directory / "base")
    paths = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        tokenizer = AutoTokenizer.from_pretrained(base)
        special = ["<|im_start|>", "<|im_end|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        if name != "no template":
            tokenizer.chat_template = layout.jinja()
        if layout.strips_content:  # composed characters: fewer than in the text
            tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
        paths[name] = directory / str(number)
        tokenizer.save_pretrained(paths[name])
    return paths


def expected_documents(
    tokenizer_path: Path, layout: Layout, turns_of: Sequence[Sequence[Turn]], append_eod: bool
) -> list[list[Prediction]]:
    """All predictions of every conversation, from its characters and the tokens' last ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    documents = []
    for turns in turns_of:
        read = characters(turns, layout)
        encoding = tokenizer.encode("".join(character for character, _ in read))
        tokens = list(encoding.ids)
        trained = [read[end - 1][1] for _, end in encoding.offsets]
        if append_eod:
            tokens.append(tokenizer.token_to_id("<|endoftext|>"))
            trained.append(turns[-1][0] == "assistant")
        documents.append(
            [
                (tokens[i], tokens[i + 1], 1.0 if trained[i + 1] else 0.0)
                for i in range(len(tokens) - 1)
            ]
        )
    return documents


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40)
@given(
    turns_of=st.lists(conversations(), min_size=1, max_size=4),
    max_tokens=st.integers(4, 80),
    overlong=st.sampled_from(["split", "truncate"]),
    append_eod=st.booleans(),
    multiple=st.sampled_from([1, 8]),
)
def test_every_weight_of_the_packed_row(
    tokenizers: dict[str, Path],
    layout: str,
    turns_of: list[list[Turn]],
    max_tokens: int,
    overlong: str,
    append_eod: bool,
    multiple: int,
) -> None:
    tokenizer = tokenizers[layout]
    with TemporaryDirectory() as directory:
        lines, prefix = Path(directory, "in.jsonl"), f"{directory}/data"
        records = [
            {"messages": [{"role": role, "content": content} for role, content in turns]}
            for turns in turns_of
        ]
        lines.write_text("".join(json.dumps(record) + "\n" for record in records))
        prepare(RecordFiles([lines]), prefix, tokenizer_name=str(tokenizer), append_eod=append_eod)
        index = open_stored(prefix, max_tokens=max_tokens, overlong=overlong)
        samples = [index.read(i) for i in range(len(index))]
    row = pack(samples, packed_cu_seqlens([each.length_tokens for each in samples], multiple))
    expected: list[tuple[int, int, int, float]] = []
    for document in expected_documents(tokenizer, LAYOUTS[layout], turns_of, append_eod):
        kept = document[:max_tokens] if overlong == "truncate" else document
        for position, (token, label, weight) in enumerate(kept):
            expected.append((token, label, position % max_tokens, weight))
    padding = -len(expected) % multiple
    expected += [(0, 0, position, 0.0) for position in range(padding)]
    found = zip(row.tokens, row.labels, row.position_ids, row.loss_mask, strict=True)
    assert [tuple(place) for place in found] == expected
    assert {row.tokens.dtype, row.labels.dtype, row.position_ids.dtype} == {np.dtype(np.int64)}
    assert row.loss_mask.dtype == np.float32
