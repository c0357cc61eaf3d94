"""One browser for all tests that need one."""

from collections.abc import Iterator

import pytest

from doubles.browser import Browser, find_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH: the page was not tried in a browser")
    with Browser(program, tmp_path_factory.mktemp("browser")) as started:
        yield started
