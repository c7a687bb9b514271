"""The page in a real browser, before any round: how it looks, what it refuses, and two tabs that would be one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.browser import Browser
from edgefl.web.page import built_page
from tests import needs
from tests.agents.web.pages import LINK, STATE, open_page, require_page, until
from tests.agents.web.served import SECRET, WebProcess
from tests.conftest import Mosquitto

NAME = "document.querySelector('[name=id]').value"
DOING = "document.getElementById('doing').textContent"
ELSEWHERE = "phone.test"
"""A name that is not this machine's own: what a phone sees of a page over http."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, mosquitto: Mosquitto) -> Iterator[WebProcess]:
    require_page()
    folder, more = tmp_path_factory.mktemp("tabs"), {"relay": mosquitto.address.url}
    with WebProcess(folder, page=built_page(), more=more) as served:
        yield served


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    needs.require("chromium")
    with Browser(f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1") as opened:
        yield opened


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """It, with a tab of its own for each test."""
    chromium.new_tab()
    return chromium


def test_an_address_of_another_run_says_what_to_do(page: WebProcess, browser: Browser) -> None:
    open_page(browser, f"{page.url}/#wrong")
    assert browser.value(STATE) == "refused"
    assert "Scan the code" in browser.value("document.getElementById('problem').textContent")
    open_page(browser, f"{page.url}/")
    until(browser, "document.getElementById('problem').textContent.startsWith('Scan the QR code')")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_the_dark(dark: bool, page: WebProcess, browser: Browser) -> None:
    browser.screen(360, 740, dark=dark, phone=True)
    open_page(browser, f"{page.url}/#{SECRET}")
    until(browser, f"{STATE} === 'asking'")
    browser.value("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.value("document.documentElement.scrollWidth") == 360
    ground, ink = browser.value(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (brightness(ground) < 60, brightness(ink) > 200) == (dark, dark)
    touched = "[...document.querySelectorAll('button, label, summary')].filter(a => a.checkVisibility())"
    assert browser.value(f"{touched}.every(a => a.getBoundingClientRect().height >= 30)")


def brightness(colour: str) -> float:
    """Of ``rgb(r, g, b)``, 0 to 255."""
    values = [float(each) for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(values) / 3


@pytest.mark.parametrize(("host", "locks"), [("127.0.0.1", True), (ELSEWHERE, False)])
def test_a_second_tab_takes_over(host: str, locks: bool, page: WebProcess, browser: Browser) -> None:
    address = f"http://{host}:{page.port}/#{SECRET}"
    first = browser.tab
    open_page(browser, address)
    assert browser.value("'locks' in navigator") is locks
    browser.value("for (const _ of 'ab') document.querySelector('#join button').click()")
    until(browser, f"{LINK} === 'up'")
    name = browser.value(NAME)

    second = browser.new_tab()
    open_page(browser, address)
    until(
        browser, f"{DOING} === 'another tab runs as {name}: this one waits, and goes on once that is closed'"
    )
    assert (browser.value(NAME), browser.value(STATE), browser.value(LINK)) == (name, "starting", "")
    browser.to(first)
    assert browser.value(LINK) == "up", "nobody took its place"
    assert "another tab" not in browser.value(DOING), "who presses twice joins once"
    browser.close_tab()

    browser.to(second)
    until(browser, f"{LINK} === 'up'")
