"""The page in a real browser, as tests look at it."""

from __future__ import annotations

from benchmarks.browser import Browser
from edgefl.errors import ConfigError
from edgefl.web import page
from tests import needs

STATE = "document.body.dataset.state"
LINK = "document.body.dataset.link"
TILE = "document.querySelector('[data-tile={}] dd').textContent"


def require_page() -> None:
    """Skip the test if there is no browser, or the page is not built."""
    needs.require("chromium")
    try:
        page.built_page()
    except ConfigError as error:
        needs.require("npm")
        needs.skip(error.message)


def open_page(browser: Browser, address: str) -> list[str]:
    """The page, once its server listens; what it asked the network for and what went wrong are kept by the browser."""
    for _ in range(100):
        browser.open("about:blank")
        page = browser.open(address)
        if browser.value("document.body?.dataset.state") is not None:
            break
    browser.until("!['loading', null].includes(document.body.dataset.state)")
    return page.problems


def until(browser: Browser, expression: str) -> None:
    """As :meth:`Browser.until`, but for three minutes, and with what the page shows where it is never so."""
    for patience in range(3):
        try:
            browser.until(expression)
            return
        except AssertionError as error:
            if patience == 2:
                raise AssertionError(f"{error}\n{browser.value('document.body.innerText')}") from None
