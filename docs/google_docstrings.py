# SPDX-License-Identifier: Apache-2.0
"""Reads docstrings for the site: reStructuredText with Google's sections, such as Args."""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Parser as ReStructuredText
from sphinx.ext.napoleon import GoogleDocstring


class Parser(ReStructuredText):
    """The reStructuredText that Sphinx's napoleon makes of a docstring."""

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(str(GoogleDocstring(inputstring)), document)
