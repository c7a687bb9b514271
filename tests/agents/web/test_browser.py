"""Two tabs of one browser that would be the same device: one has it, the other says so, waits, and takes over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgefl.bench.common.browser import Browser
from edgefl.web.built import built_page
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
def browser() -> Iterator[Browser]:
    with Browser(f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1") as opened:
        yield opened


@pytest.mark.parametrize(("host", "locks"), [("127.0.0.1", True), (ELSEWHERE, False)])
def test_a_second_tab_waits_and_takes_over(
    host: str, locks: bool, page: WebProcess, browser: Browser
) -> None:
    address = f"http://{host}:{page.port}/#{SECRET}"
    first = browser.new_tab()
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
