# SPDX-License-Identifier: Apache-2.0
"""What is trained of a conversation, character by character from the template's text."""

from collections.abc import Sequence
from dataclasses import dataclass

Turn = tuple[str, str]
"""Role and content."""


@dataclass(frozen=True)
class Layout:
    """A chat template in three pieces of text around every content, and what to do with it."""

    opening: str
    closing: str
    default_system: str | None = None
    strips_content: bool = False
    marks_content: bool = False

    def jinja(self) -> str:
        """This layout as a chat template for transformers."""
        content = "m.content | trim" if self.strips_content else "m.content"
        before, after = (text.replace("\n", "\\n") for text in (self.opening, self.closing))
        before = before.replace("ROLE", "' + m.role + '")
        asked = self.opening.replace("ROLE", "assistant").replace("\n", "\\n")
        default = ""
        if self.default_system is not None:
            text = self.opening.replace("ROLE", "system") + self.default_system + self.closing
            text = text.replace("\n", "\\n")
            default = "{% if messages[0].role != 'system' %}{{ '" + text + "' }}{% endif %}"
        spoken = "{{ " + content + " }}"
        if self.marks_content:
            marked = "{% generation %}" + spoken + "{% endgeneration %}"
            spoken = (
                "{% if m.role == 'assistant' %}" + marked + "{% else %}" + spoken + "{% endif %}"
            )
        turn = "{{ '" + before + "' }}" + spoken + "{{ '" + after + "' }}"
        return (
            default
            + "{% for m in messages %}"
            + turn
            + "{% endfor %}{% if add_generation_prompt %}{{ '"
            + asked
            + "' }}{% endif %}"
        )


def characters(turns: Sequence[Turn], layout: Layout) -> list[tuple[str, bool]]:
    """Every character of the rendered conversation, and whether it is trained on."""
    found: list[tuple[str, bool]] = []

    def add(text: str, trained: bool) -> None:
        for character in text:
            found.append((character, trained))

    if layout.default_system is not None and turns[0][0] != "system":
        add(layout.opening.replace("ROLE", "system"), False)
        add(layout.default_system, False)
        add(layout.closing, False)
    for role, content in turns:
        spoken = content.strip() if layout.strips_content else content
        add(layout.opening.replace("ROLE", role), False)
        add(spoken, role == "assistant")
        add(layout.closing, role == "assistant" and not layout.marks_content)
    return found
