"""Hook of mkdocs (mkdocs.yml): removes the Sphinx roles of docstrings, such as ``:func:``, which Markdown prints."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:py:)?(?:attr|class|data|exc|func|meth|mod):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Return the page's HTML with each role replaced by its name as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
