"""Construction of HTML. Text is escaped when it becomes markup, so that content cannot inject markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TypeAlias
from urllib.parse import quote

import msgspec


class Html(str):
    """Text that is HTML markup already and is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "str | Html | None"
_EMPTY = frozenset({"input", "link", "meta", "br"})


def el(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """Return the element ``name`` with ``children`` as its contents. A child that is not :class:`Html` is escaped.

    ``class_`` becomes ``class``, and ``data_x`` becomes ``data-x``. An attribute with the value True has no value;
    None or False omits it.
    """
    rendered = "".join(_attribute(name, value) for name, value in attributes.items())
    if name in _EMPTY:
        return Html(f"<{name}{rendered}>")
    return Html(f"<{name}{rendered}>{join_children(*children)}</{name}>")


def join_children(*children: Child) -> Html:
    """Return the children concatenated. Children that are not :class:`Html` are escaped; None is empty."""
    return Html("".join(each if isinstance(each, Html) else escape(each or "") for each in children))


def link(path: str, *children: Child, **attributes: str | int | None) -> Html:
    """Return a link to ``path`` with the given contents and attributes."""
    return el("a", *children, href=path, **attributes)


def device_path(name: str) -> str:
    """Return the URL path of the page of device ``name``."""
    return f"/devices/{quote(name, safe='')}"


class TableColumn(msgspec.Struct, frozen=True):
    """Column of a table. ``number``: right-aligned figures. ``wide``: hidden on narrow screens. ``optional``: hidden
    while all its cells are empty.
    """

    name: str
    number: bool = False
    wide: bool = False
    optional: bool = False

    @property
    def classes(self) -> str | None:
        known = (("n", self.number), ("wide", self.wide), ("optional", self.optional))
        return " ".join(name for name, on in known if on) or None


def row(key: str, columns: list[TableColumn], cells: Sequence[Child], kind: str = "") -> Html:
    """Return a table row with one of ``cells`` per column. ``kind`` is its CSS class, or empty.

    ``key`` identifies the row, so that the page's script can replace it.
    """
    made = (el("td", cell, class_=column.classes) for column, cell in zip(columns, cells, strict=True))
    return el("tr", *made, data_key=key, class_=kind or None)


def table(name: str, caption: str, columns: list[TableColumn], rows: list[Html]) -> Html:
    """Return a table in a box that scrolls on narrow screens. ``name`` is the element id of its body.

    ``caption`` is its title. The page's script replaces rows by that id.
    """
    head = el("tr", *(el("th", each.name, scope="col", class_=each.classes) for each in columns))
    body = el("tbody", *rows, id=name)
    made = el("table", el("caption", caption), el("thead", head), body)
    return el("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _attribute(name: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
