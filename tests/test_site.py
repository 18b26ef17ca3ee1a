"""The documentation site in headless Chromium, as a web server serves it: every page on a desktop and a phone, and the search."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fenced_blocks import ROOT
from tests.report.browser import CHROMIUM, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

BROKEN_IMAGES = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
SEARCH = """(() => {
  document.querySelector("[data-md-toggle=search]").checked = true;
  const input = document.querySelector(".md-search__input");
  input.focus();
  input.value = "standby";
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})()"""
BACKGROUND, WHITE = "getComputedStyle(document.body).backgroundColor", "rgb(255, 255, 255)"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of the site, and the address that serves it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = Browser(tmp_path / "profile")
    yield found
    found.close()


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)])
def test_every_page_is_complete_as_wide_as_the_screen_and_in_the_colours_of_the_system(site, browser, width, dark):
    folder, address = site
    pages = sorted(path.relative_to(folder) for path in folder.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 30
    for page in pages:
        browser.open(f"{address}/{page}", width=width, height=900, dark=dark)
        assert browser.value("document.documentElement.scrollWidth") <= width, page
        assert browser.value(BROKEN_IMAGES) == [], page
        assert browser.value("document.querySelector('h1').innerText"), page
    assert (browser.value(BACKGROUND) != WHITE) == dark and browser.problems == []


def test_the_search_finds_a_flag(site, browser):
    _, address = site
    browser.open(f"{address}/index.html")
    browser.value(SEARCH)
    browser.wait_for("document.querySelectorAll('.md-search-result__item a').length > 2")
    links = browser.value("[...document.querySelectorAll('.md-search-result__item a')].map(link => link.href)")
    assert any("training.html" in link or "reference/" in link for link in links), links
    assert browser.problems == []
