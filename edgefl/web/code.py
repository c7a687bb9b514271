"""The QR code of the page's address, for a terminal and for the page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from edgefl.errors import ConfigError
from edgefl.system.distribution import install

if TYPE_CHECKING:
    import segno


def in_terminal(url: str) -> str:
    """Lines of text, two modules of the code in each letter; a light border lets it be read on any ground."""
    out = io.StringIO()
    _code(url).terminal(out, compact=True, border=2)
    return out.getvalue()


def as_svg(url: str) -> bytes:
    """Dark on light, whatever the page's own colours are: cameras want it so."""
    out = io.BytesIO()
    _code(url).save(out, kind="svg", scale=4, border=2, dark="#000", light="#fff", xmldecl=False)
    return out.getvalue()


def _code(url: str) -> segno.QRCode:
    try:
        import segno
    except ModuleNotFoundError as error:
        raise ConfigError(f"QR codes are drawn by segno, which is not installed: {install('web')}") from error
    return segno.make(url, error="m", micro=False)
