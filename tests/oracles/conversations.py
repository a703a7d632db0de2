# SPDX-License-Identifier: Apache-2.0
"""What is trained of a conversation, character by character from the template's text."""

import json
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
        opening, closing = json.dumps(self.opening), json.dumps(self.closing)
        turns, spoken = "messages", "{{ m.content }}"
        if self.default_system is not None:
            first = json.dumps([{"role": "system", "content": self.default_system}])
            turns = f"([] if messages[0].role == 'system' else {first}) + messages"
        if self.strips_content:
            spoken = "{{ m.content | trim }}"
        if self.marks_content:
            marked = f"{{% generation %}}{spoken}{{% endgeneration %}}"
            spoken = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{spoken}{{% endif %}}"
        return (
            f"{{% for m in {turns} %}}{{{{ {opening} | replace('ROLE', m.role) }}}}{spoken}"
            f"{{{{ {closing} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {opening} | replace('ROLE', 'assistant') }}}}"
            "{% endif %}"
        )


def characters(turns: Sequence[Turn], layout: Layout) -> list[tuple[str, bool]]:
    """Every character of the rendered conversation, and whether it is trained on."""
    found: list[tuple[str, bool]] = []
    if layout.default_system is not None and turns[0][0] != "system":
        turns = [("system", layout.default_system), *turns]
    for role, content in turns:
        spoken = content.strip() if layout.strips_content else content
        is_learnt = role == "assistant"
        found += [(character, False) for character in layout.opening.replace("ROLE", role)]
        found += [(character, is_learnt) for character in spoken]
        closed = is_learnt and not layout.marks_content
        found += [(character, closed) for character in layout.closing]
    return found
