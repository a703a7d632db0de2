# SPDX-License-Identifier: Apache-2.0
"""What conversations become under templates of the field, and what of it is trained."""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_records import write_parquet
from data.tokenizers_of_tests import save_tokenizer

from sparsebalance_megatron.cli import main
from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.records import Message

Capsys = pytest.CaptureFixture[str]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS_EXACTLY = CHATML.replace("<|im_end|>\n", "<|im_end|>")
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3: tools first, calls as JSON, an empty think block before answers."""
MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TALK: list[Message] = [
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "it is 2024"},
]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}],
}


class Prepared:
    """What ``prepare-data`` did with records under a template."""

    def __init__(
        self,
        folder: Path,
        template: str | None,
        records: Sequence[dict[str, Any]],
        capsys: Capsys,
        *flags: str,
        eos: str = "<|endoftext|>",
        begins_texts: bool = False,
        file: str = "in.jsonl",
    ) -> None:
        path, self._prefix = folder / "tokenizer", folder / "data"
        folder.mkdir(exist_ok=True)
        self._tokenizer = save_tokenizer(
            path, chat_template=template, eos=eos, begins_texts=begins_texts
        )
        if file.endswith(".parquet"):
            write_parquet(folder / file, records)
        else:
            (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
        words = ("--input", str(folder / file), "--output-prefix", str(self._prefix), *flags)
        self.status = main(["prepare-data", *words, "--tokenizer", str(path)])
        self.out, self.err = capsys.readouterr()

    @property
    def documents(self) -> list[str]:
        """Texts, with trained tokens in brackets."""
        stored = Documents.open(str(self._prefix))
        return [self._shown(stored, number) for number in range(len(stored))]

    def _shown(self, stored: Documents, number: int) -> str:
        place = stored.place(number, 0, int(stored.lengths_tokens[number]))
        tokens = stored.tokens[place]
        trained = np.ones(len(tokens)) if stored.loss_mask is None else stored.loss_mask[place]
        text = ""
        for mark, run in groupby(zip(trained, tokens.tolist(), strict=True), itemgetter(0)):
            decoded = self._tokenizer.decode([token for _, token in run], skip_special_tokens=False)
            text += f"[{decoded}]" if mark else decoded
        return text

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self._prefix.with_suffix(".json").read_text())
        return summary


ASKED = "<|im_start|>user\nis it?<|im_end|>\n<|im_start|>assistant\n"


THINKS = "[<think>\n\n</think>\n\nit is 2024<|im_end|>\n]"
NOT_THINKING = ("--chat-template-kwargs", '{"enable_thinking": false}')
DATED = CHATML.replace("{% for", "{{ date or strftime_now('%Y') }}{% for", 1)
IGNORES, KNOWS, WRITES, ENDS = (
    "ignores add_generation_prompt",
    "knows enable_thinking",
    "may write the time",
    "1 documents end with the end-of-sequence token",
)


ENDED = {"eos": "<|im_end|>"}


@pytest.mark.parametrize(
    ("template", "flags", "settings", "expected", "noted"),
    [
        (TURNS, (), {}, "user: is it?\n[assistant: it is 2024\n<|endoftext|>]", IGNORES),
        (QWEN, (), {}, f"{ASKED}{THINKS[:-1]}<|endoftext|>]", KNOWS),
        (
            *(QWEN, NOT_THINKING, {}),
            *(f"{ASKED}<think>\n\n</think>\n\n[it is 2024<|im_end|>\n<|endoftext|>]", None),
        ),
        (
            *(DATED, ("--chat-template-kwargs", '{"date": "1999"}'), {}),
            *(f"1999{ASKED}[it is 2024<|im_end|>\n<|endoftext|>]", WRITES),
        ),
        (CHATML, (), ENDED, ASKED + "[it is 2024<|im_end|>\n]", ENDS),
        (ENDS_EXACTLY, (), ENDED, ASKED.replace(">\n<", "><") + "[it is 2024<|im_end|>]", ENDS),
        (MARKS, (), ENDED, ASKED + "[it is 2024<|im_end|>]\n", ENDS),
    ],
)
def test_what_of_a_turn_is_trained_and_noted(
    template: str,
    flags: tuple[str, ...],
    settings: dict[str, str],
    expected: str,
    noted: str | None,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    """With the end-of-sequence token once."""
    done = Prepared(tmp_path, template, [{"messages": TALK}], capsys, *flags, **settings)
    assert done.documents == [expected]
    notes = [note for note in (IGNORES, KNOWS, WRITES, ENDS) if note in done.out]
    assert notes == ([noted] if noted else [])
    assert done.summary["chat_template_kwargs"] == (json.loads(flags[1]) if flags else {})


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": "wait"}])
def test_tools_are_written_and_calls_trained(
    content: dict[str, Any], tmp_path: Path, capsys: Capsys
) -> None:
    """Arguments that are JSON text are written as the object that they hold."""
    call = {key: value for key, value in CALL.items() if key != "content"} | content
    result = {"role": "tool", "content": ""}
    record = {"messages": [TALK[0], call, result, TALK[1]], "tools": [TOOL]}
    done = Prepared(tmp_path, QWEN, [record], capsys, "--no-append-eod")
    written = content.get("content") or ""
    assert done.documents == [
        f"<|im_start|>system\n{json.dumps(TOOL)}<|im_end|>\n{ASKED}"
        f"[<think>\n\n</think>\n\n{written}"
        '<call>{"name": "clock", "arguments": {"zone": "UTC"}}</call><|im_end|>\n]'
        "<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\n\n</think>\n\nit is 2024<|im_end|>\n]"
    ]


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"trainable": False}, {"loss": False}, {"loss_mask": 0}],
)
@pytest.mark.parametrize("template", [CHATML, MARKS, None])
def test_turns_marked_as_not_to_be_learnt_are_not(
    template: str | None, mark: dict[str, Any], tmp_path: Path, capsys: Capsys
) -> None:
    wrong = {"role": "assistant", "content": "wrong"}
    learnt: Message = TALK[1] | {key: 1 for key in mark} | {"loss_scale": 0.5}
    ended_wrong = [*TALK, TALK[0], wrong | mark]
    records = [
        {"messages": [TALK[0], wrong | mark, TALK[0] | {"loss": None}, learnt]},
        {"messages": ended_wrong},
        {"messages": [TALK[0] | {"train": True}, wrong | mark]},
    ]
    done = Prepared(tmp_path, template, records, capsys)
    for document in done.documents[:2]:
        trained = re.findall(r"\[(.*?)\]", document, re.DOTALL)[0]
        assert trained.strip().startswith("it is 2024") and "wrong" in document.replace(trained, "")
    assert "[" not in done.documents[2] and done.summary["untrained_documents"] == 1
    assert "3 turns of the assistant are marked as not to be learnt" in done.out
    assert "loss_scale, found 1 times, is not read" in done.out
    assert "train of user turns, found 1 times, is not read" in done.out


GENERATED = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
TURN_MACRO = (
    "{% macro turn(m) %}{{ m.role }}: {% if m.role == 'assistant' %}"
    + GENERATED
    + "{% else %}{{ m.content }}{% endif %}{% endmacro %}"
)
EACH = "{% for m in messages %}"


@pytest.mark.parametrize(
    "template",
    [
        TURN_MACRO + EACH + "{{ turn(m) }}{% endfor %}",
        TURN_MACRO
        + "{% set all = namespace(text='') %}"
        + EACH
        + "{% set all.text = all.text + turn(m) %}{% endfor %}{{ all.text }}",
        EACH + "{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}{% else %}{% set x %}"
        f"{GENERATED}{{% endset %}}{{{{ x }}}}{{% endif %}}{{% endfor %}}",
        "{% macro wrap() %}assistant: {{ caller() }}{% endmacro %}" + EACH + "\n"
        "  {%- if m.role == 'user' %}user: {{ m.content }}{% else %}\n"
        f"  {{%- call wrap() -%}}\n  {GENERATED}\n  {{%- endcall %}}\n"
        "  {%- endif %}\n{%- endfor %}",
    ],
)
def test_a_tag_inside_a_macro_or_a_block_marks_its_text(
    template: str, tmp_path: Path, capsys: Capsys
) -> None:
    done = Prepared(tmp_path, template, [{"messages": TALK}], capsys)
    assert done.documents == ["user: is it?assistant:[ it is 2024<|endoftext|>]"]


SPLITS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
KEEPS_LAST_CONTENT = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
NO_TOOLS = CHATML.replace("%}<", "%}{% if m.role in ('user', 'assistant') %}<", 1).replace(
    "{% endfor", "{% endif %}{% endfor"
)
FIRST_SYSTEM = "{{ messages[0].content if messages[0].role == 'system' }}"
THOUGHT = {"role": "assistant", "content": "<think>so</think>yes"}
RESULTS = [TALK[0], {"role": "assistant", "content": "call"}, {"role": "tool", "content": "2024"}]


@pytest.mark.parametrize("file", ["in.jsonl", "in.parquet"])
def test_what_is_written_or_left_out_of_some_turns_is_not_refused(
    file: str, tmp_path: Path, capsys: Capsys
) -> None:
    """A system text becomes the first turn; reasoning left out of earlier turns is counted."""
    template = FIRST_SYSTEM + MARKS.replace("{{ m.content }}{% end", KEEPS_LAST_CONTENT + "{% end")
    records = [{"system": "be kind", "messages": [TALK[0], THOUGHT, TALK[0], THOUGHT]}]
    done = Prepared(tmp_path, template, records, capsys, "--no-append-eod", file=file)
    assert done.documents[0].startswith("be kind<|im_start|>system\nbe kind<|im_end|>")
    assert "[yes]" in done.documents[0] and "[<think>so</think>yes]" in done.documents[0]
    assert "leaves out the reasoning of 1 turns" in done.out


def test_turns_that_are_quoted_are_written(tmp_path: Path, capsys: Capsys) -> None:
    """Nor is what says nothing missed: no content beside calls, and results that are empty."""
    template = QWEN.replace("{{ m.content }}", "{{ m.content | tojson }}")
    talk = [TALK[0] | {"content": 'a\n"b"'}, CALL, {"role": "tool", "content": ""}, TALK[1]]
    done = Prepared(tmp_path, template, [{"messages": talk, "tools": [TOOL]}], capsys)
    assert done.status == 0 and '"a\\n\\"b\\""' in done.documents[0]


CUTS = TURN_MACRO + EACH + "{{ turn(m)[:-3] }}{% endfor %}"
COUNTS = MARKS.replace("{{ m.content }}{% end", "{{ loop.revindex }} {{ m.content }}{% end")
UNLEARNT = [TALK[0], TALK[1] | {"train": False}] * 8 + TALK
UNREADABLE = {"function": {"name": "clock", "arguments": "{"}}
CALLING = {"messages": [*TALK, TALK[0], CALL]}
FOLLOWED = {"messages": [*TALK, TALK[0]]}
REFUSED: list[tuple[str | None, dict[str, Any], str]] = [
    *(
        (each, {"messages": TALK, "tools": [TOOL]}, "write tools;")
        for each in (CHATML, MARKS, None)
    ),
    *((each, CALLING, "write tool_calls;") for each in (CHATML, MARKS, None)),
    (QWEN, {"messages": [TALK[0], CALL | {"tool_calls": [{"name": "clock"}]}]}, "tool_calls[0]"),
    (
        QWEN,
        {"messages": [TALK[0], CALL | {"tool_calls": [UNREADABLE]}]},
        "arguments: not valid JSON",
    ),
    (
        QWEN,
        {"messages": [TALK[0], CALL | {"tool_calls": []}]},
        "content is empty, and there are no tool_calls",
    ),
    (CHATML, {"messages": TALK[::-1] + TALK}, "begin with a user or system turn"),
    ("{{ raise_exception('no') }}", {"messages": TALK}, "it refuses the conversation: no"),
    # What would be lost.
    (SPLITS, {"messages": [TALK[0], THOUGHT]}, "write the reasoning of turn 2"),
    (CHATML, {"messages": [TALK[0], TALK[1] | {"reasoning_content": "so"}]}, "write the reas"),
    (NO_TOOLS, {"messages": [*RESULTS, TALK[1]]}, "write the content of turn 3 (tool)"),
    (NO_TOOLS, {"system": "be kind", "messages": TALK}, "content of turn 1 (system)"),
    (CHATML, {"messages": TALK, "functions": [{"name": "f"}]}, "give them as tools"),
    (CHATML, {"messages": TALK, "documents": ["d"]}, "'documents' is not used"),
    (CHATML, {"messages": TALK, "chat_template_kwargs": {"a": 1}}, "--chat-template-kwargs"),
    (CHATML, {"messages": [TALK[0], TALK[1] | {"train": 2}]}, "train is 2"),
    (CHATML, {"messages": [TALK[0], TALK[1] | {"function_call": {"name": "f"}}]}, "tool_calls"),
    (
        CHATML,
        {"system": "a", "messages": [{"role": "system", "content": "b"}, *TALK]},
        "differs from the system turn",
    ),
    # Marks that are changed, or in other places where other turns follow.
    (CUTS, {"messages": TALK}, "it changes what {% generation %}"),
    (COUNTS, {"messages": UNLEARNT}, "turn 2, which is not to be learnt, otherwise"),
    # The time, a rewriting of earlier turns, another opening than what turns begin with.
    (TURNS + "{{ strftime_now('%f') }}", FOLLOWED, "it writes another text each time"),
    ("{{ messages[-1].content }}", FOLLOWED, "it does not render turn 2 as a suffix"),
    (TURNS + "{% if add_generation_prompt %}Now: {% endif %}", FOLLOWED, "turn 2 as a suffix"),
]


REFUSED_FLAGS: list[tuple[str | None, tuple[str, ...], str]] = [
    (CHATML, ("--prepend-bos",), "--prepend-bos: the tokenizer "),
    (CHATML, ("--chat-template-kwargs", '{"tokenize": true}'), "tokenize is set for every"),
    (None, ("--chat-template-kwargs", '{"a": 1}'), " has no chat template"),
]


@pytest.mark.parametrize(
    ("template", "record", "flags", "named"),
    [
        *((template, record, (), named) for template, record, named in REFUSED),
        *((template, {"messages": TALK}, *flags) for template, *flags in REFUSED_FLAGS),
    ],
)
def test_what_cannot_be_rendered_is_named(
    template: str | None,
    record: dict[str, Any],
    flags: tuple[str, ...],
    named: str,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    """Records with their line."""
    done = Prepared(tmp_path, template, [record], capsys, *flags)
    assert done.status == 2 and named in done.err
    assert ("in.jsonl:1: " in done.err) == (not flags)


@pytest.mark.parametrize(
    "template",
    [
        "{# {% generation %} #}" + CHATML,
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + CHATML,
        MARKS.replace("'assistant'", "'model'"),
    ],
)
def test_a_tag_that_marks_nothing_is_an_error(
    template: str, tmp_path: Path, capsys: Capsys
) -> None:
    done = Prepared(tmp_path, template, [{"messages": TALK}] * 3, capsys)
    assert done.status == 2
    assert "none of 3 documents has a token that is trained; the chat template's" in done.err
    assert not list(tmp_path.glob("data*"))


def test_documents_in_which_a_tag_marks_nothing_are_counted(tmp_path: Path, capsys: Capsys) -> None:
    template = MARKS.replace("== 'assistant'", "== 'assistant' and m.content != 'no'")
    unmarked = [TALK[0], {"role": "assistant", "content": "no"}]
    done = Prepared(tmp_path, template, [{"messages": TALK}, {"messages": unmarked}], capsys)
    assert done.documents[1] == ASKED + "no<|im_end|>\n<|endoftext|>"
    tokens = done.summary["untrained_tokens"]
    assert done.summary["untrained_documents"] == 1 and 0 < tokens < done.summary["tokens"]
    assert f"note: 1 documents, {tokens} tokens, have no token that is trained" in done.out


@pytest.mark.parametrize("flags", [(), ("--prepend-bos",)])
def test_texts_begin_with_a_token_if_asked_for(
    flags: tuple[str, ...], tmp_path: Path, capsys: Capsys
) -> None:
    """Conversations have what their template writes."""
    records = [{"text": "it is"}, {"messages": TALK}]
    done = Prepared(tmp_path, CHATML, records, capsys, *flags, begins_texts=True)
    begin = "<s>" if flags else ""
    assert done.documents[0] == f"[{begin}it is<|endoftext|>]"
    assert done.documents[1].startswith("<|im_start|>")
    assert ("would begin 1 texts with <s>; --prepend-bos" in done.out) == (not flags)
