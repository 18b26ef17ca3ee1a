"""The playground in headless Chromium: type, generate, streamed text, probabilities on hover, two models side by side.

With HOLDFAST_SCREENSHOTS=DIR the test leaves screenshots there: light, dark, and at the width of a phone.
"""

import json
import os
import time
from pathlib import Path

import pytest

from holdfast import generate
from holdfast.generation.loading import load_model
from holdfast.generation.slots import SlotEngine
from holdfast.generation.text_stream import TextStream
from tests.serve.browser import browser, chromium
from tests.serve.conftest import serving, write_gpt2

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

CONTROL = 2
TEXT = "document.querySelectorAll('.text')[{}].textContent"
DONE = "!document.getElementById('generate').disabled && document.querySelectorAll('.token').length > 0"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def screenshot(page, name):
    folder = os.environ.get("HOLDFAST_SCREENSHOTS")
    if folder:
        page.screenshot(Path(folder) / f"{name}.png")


def set_value(page, **values):
    for name, value in values.items():
        page.evaluate(
            f"(() => {{ const e = document.getElementById({name!r}); e.value = {value!r};"
            "e.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )


def open_page(page, url):
    page.call("Page.navigate", url=url)
    page.wait("document.readyState === 'complete' && document.querySelectorAll('.pane').length > 0")


def test_two_models_write_side_by_side_with_probabilities_on_hover(page, gpt2_folder, tmp_path):
    other = write_gpt2(tmp_path / "second", template=None)
    with serving(gpt2_folder, other) as server:
        page.view(1200, 860)
        open_page(page, server.url)
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.type("the quick")
        set_value(page, temperature="0", max_tokens="40")
        page.press("Enter", CONTROL)
        page.wait(DONE)
        expected = generate(gpt2_folder, "the quick", max_new_tokens=40, temperature=0)[0]
        for pane in (0, 1):  # the second model has the same weights
            assert page.evaluate(TEXT.format(pane)) == expected.text
        assert page.evaluate("document.querySelector('.status').textContent").startswith("40 tokens")
        # Tokens that only together are characters share a span.
        stream = TextStream(load_model(gpt2_folder).tokenizer.decode)
        pieces = [stream.add(token) for token in expected.tokens]
        pieces[-1] += stream.finish()
        spans = page.evaluate(
            "[...document.querySelector('.text').querySelectorAll('.token')].map((t) => [t.textContent, t.tokens.length])"
        )
        assert [text for text, _ in spans] == [piece for piece in pieces if piece]
        assert sum(count for _, count in spans) == 40
        page.hover(".token")
        page.wait("!document.getElementById('tip').hidden")
        rows = page.evaluate(
            "[...document.querySelectorAll('#tip tr')].map((r) => [r.className, parseFloat(r.cells[2].textContent)])"
        )
        assert len(rows) == 5 * spans[0][1] and sum(row[0] == "chosen" for row in rows) == spans[0][1]
        assert rows[0] == ["chosen", max(row[1] for row in rows[:5])]  # greedy
        screenshot(page, "two-models-light")
        # What looks like HTML stays text, and the likeliest alternative is first though an object lists numbers first.
        image = "<img src=x onerror=alert(1)>"
        logprobs = {"tokens": [image], "token_logprobs": [-1], "top_logprobs": [{"7": -3, "<b>": -2, image: -1}]}
        page.evaluate(f"panes[0].add({image!r}, {{...{json.dumps(logprobs)}, text_offset: [panes[0].length]}})")
        page.evaluate("showTip(document.querySelector('.text').lastChild)")
        names = page.evaluate("[...document.querySelectorAll('#tip tr')].map((r) => r.cells[0].textContent)")
        assert names == [image.replace(" ", "\N{OPEN BOX}"), "<b>", "7"]
        assert page.evaluate("document.querySelector('.text').lastChild.textContent") == image
        assert page.evaluate("document.querySelectorAll('img, b').length") == 0
        page.view(1200, 860, dark=True)
        screenshot(page, "two-models-dark")


def test_text_streams_and_stops_on_request_and_errors_are_shown(page, gpt2_folder, monkeypatch):
    step = SlotEngine.step
    monkeypatch.setattr(SlotEngine, "step", lambda engine: time.sleep(0.02) or step(engine))  # 40 s for the text
    with serving(gpt2_folder, slots=1) as server:
        page.view(390, 844)
        open_page(page, server.url)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.type("a fox")
        set_value(page, temperature="0", max_tokens="2000")
        page.evaluate("document.getElementById('generate').click()")
        page.wait("document.querySelectorAll('.token').length > 5")  # before the end: it is a stream
        assert page.evaluate("document.getElementById('generate').disabled")
        page.press("Escape")
        page.wait("!document.getElementById('generate').disabled")
        assert "stopped" in page.evaluate("document.querySelector('.status').textContent")
        # The arrow keys move from token to token.
        page.evaluate("document.querySelector('.text').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert page.evaluate("[...document.querySelectorAll('.token')].findIndex((t) => t.matches('.current'))") == 1
        assert not page.evaluate("document.getElementById('tip').hidden")
        screenshot(page, "phone-light")
        page.view(390, 844, dark=True)
        screenshot(page, "phone-dark")
        set_value(page, max_tokens="2000", prompt="fox " * 3000)
        page.evaluate("document.getElementById('generate').click()")
        page.wait("!document.getElementById('error').hidden")
        assert "maximum context length" in page.evaluate("document.getElementById('error').textContent")


def test_a_server_with_a_key_asks_for_it(page, gpt2_folder):
    with serving(gpt2_folder, api_key="s3cret") as server:
        page.call("Page.navigate", url=server.url)
        page.wait("document.getElementById('key-row') && !document.getElementById('key-row').hidden")
        page.evaluate(
            "(() => { const e = document.getElementById('key'); e.value = 's3cret'; e.dispatchEvent(new Event('change')); })()"
        )
        page.wait("document.querySelectorAll('.pane').length === 1 && document.getElementById('error').hidden")
