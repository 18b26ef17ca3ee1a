"""Servers that fail in many ways: the file arrives whole or not at all, and no byte is requested twice without need."""

import gzip
import time
from email.utils import formatdate

import pytest

from holdfast import fetch
from holdfast.assets import resolve, transfer
from holdfast.assets.catalog import CATALOG, CatalogEntry, FileSpec
from holdfast.system.errors import HoldfastError
from tests.assets.loopback import fails, resets_after, sha256, some_bytes, stops_after
from tests.assets.test_fetching import files_in, leftovers_in

CONTENT = some_bytes(1_000_000)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_passing_fault_is_tried_again(server, status):
    url = server.put("/file", CONTENT, script=[fails(status), fails(status)])
    assert fetch(url).read_bytes() == CONTENT
    assert [one.status for one in server.requests] == [status, status, 200]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_a_lasting_fault_is_not_tried_again(server, cache, status):
    url = server.put("/file", CONTENT, script=[fails(status)])
    with pytest.raises(HoldfastError, match=f"{url}: the server answered {status}"):
        fetch(url)
    assert len(server.requests) == 1 and files_in(cache) == []


def test_a_fault_that_never_passes_ends_in_an_error(server):
    url = server.put("/file", CONTENT, script=[fails(503)] * 100)
    with pytest.raises(HoldfastError, match=r"503 .*tried 6 times"):
        fetch(url)
    assert len(server.requests) == 6


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(server, form):
    value = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    url = server.put("/file", CONTENT, script=[fails(503, Retry_After=value)])
    began = time.monotonic()
    assert fetch(url).read_bytes() == CONTENT
    assert time.monotonic() - began >= 0.9


def test_a_server_that_asks_for_more_time_than_there_is_ends_the_fetch_at_once(server):
    url = server.put("/file", CONTENT, script=[fails(503, Retry_After="100")])
    with pytest.raises(HoldfastError, match="503"):
        fetch(url, timeout=5)


@pytest.mark.parametrize("breaks", [resets_after, stops_after])
def test_a_transfer_that_breaks_goes_on_where_it_stopped(server, breaks):
    url = server.put("/file", CONTENT, script=[breaks(300_000), breaks(300_000)])
    assert fetch(url).read_bytes() == CONTENT
    starts = [one.start for one in server.requests]
    assert len(starts) == 3 and starts[0] == 0 < starts[1] < starts[2]
    assert [one.headers.get("if-range") for one in server.requests] == [None, '"v1"', '"v1"']


def test_progress_makes_patience_new(server):
    """Twenty breaks are more than the retries, but after each the file is larger."""
    url = server.put("/file", CONTENT, script=[stops_after(50_000)] * 19)
    assert fetch(url).read_bytes() == CONTENT
    assert sum(one.sent for one in server.requests) == len(CONTENT)


def test_a_server_without_ranges_that_breaks_is_asked_for_the_whole_again_and_not_for_ever(server, cache):
    url = server.put("/file", CONTENT, ranges=False, script=[stops_after(400_000)])
    assert fetch(url).read_bytes() == CONTENT
    assert [one.sent for one in server.requests] == [400_000, len(CONTENT)]
    other = server.put("/other", CONTENT, ranges=False, script=[stops_after(400_000)] * 100)
    with pytest.raises(HoldfastError, match="tried 6 times"):
        fetch(other)
    assert [path.name for path in files_in(cache)] == ["file"]


def test_a_file_that_changes_between_two_pieces_is_fetched_again(server):
    new = some_bytes(900_000, seed=7)

    def change(handler, page):
        page.content, page.etag = new, '"v2"'
        handler.serve(page)

    url = server.put("/file", CONTENT, script=[stops_after(400_000), change])
    assert fetch(url).read_bytes() == new
    assert [one.status for one in server.requests] == [200, 200]


def test_a_file_that_changes_at_a_server_that_ignores_if_range_is_fetched_again(server):
    new = some_bytes(len(CONTENT), seed=1)

    def change(handler, page):
        handler.serve(page, stop_after=300_000)
        page.content, page.etag = new, '"v2"'
        # The condition of the next request names the old file, and the server takes no notice.
        page.script.append(lambda later, page: (later.seen.headers.pop("if-range"), later.serve(page)))

    url = server.put("/file", CONTENT, script=[change])
    assert fetch(url).read_bytes() == new
    assert [one.status for one in server.requests] == [200, 206, 200]


def test_without_etag_pieces_are_joined_only_under_a_known_checksum(server):
    url = server.put("/unknown", CONTENT, etag=None, script=[stops_after(400_000)])
    assert fetch(url).read_bytes() == CONTENT
    assert [one.start for one in server.requests] == [0, 0]
    server.requests.clear()
    url = server.put("/known", CONTENT, etag=None, script=[stops_after(400_000)])
    assert fetch(url, sha256=sha256(CONTENT)).read_bytes() == CONTENT
    assert [one.start for one in server.requests] == [0, 400_000]


def test_pieces_that_do_not_fit_are_thrown_away_for_one_more_try(server):
    """The server's file changed and has no ETag: the checksum shows it."""

    def change(handler, page):
        page.content = CONTENT
        handler.serve(page)

    url = server.put("/file", some_bytes(1_000_000, seed=3), etag=None, script=[stops_after(400_000), change])
    assert fetch(url, sha256=sha256(CONTENT)).read_bytes() == CONTENT
    assert [one.start for one in server.requests] == [0, 400_000, 0]


def test_a_weak_etag_is_no_ground_to_join_pieces(server):
    url = server.put("/file", CONTENT, etag='W/"v1"', script=[stops_after(400_000)])
    assert fetch(url).read_bytes() == CONTENT
    assert [one.start for one in server.requests] == [0, 0]


def test_a_server_without_content_length_is_read_to_its_end(server):
    url = server.put("/file", CONTENT, length=False)
    assert fetch(url).read_bytes() == CONTENT


def test_a_redirect_is_followed_and_the_first_url_names_the_file(server):
    target = server.put("/store/5f2a", CONTENT)
    url = server.put("/model.bin", b"", script=[fails(302, Location=target)])
    path = fetch(url)
    assert path.name == "model.bin" and path.read_bytes() == CONTENT


def test_a_slow_trickle_ends_at_the_time_limit_and_the_next_call_continues(server, cache):
    url = server.put("/file", CONTENT, block=10_000, block_delay=0.05)
    with pytest.raises(HoldfastError, match=r"[\d,]+ of 1,000,000 bytes received within 0.5 s"):
        fetch(url, timeout=0.5)
    assert files_in(cache) == []
    server.pages["/file"].block_delay = 0
    assert fetch(url).read_bytes() == CONTENT
    assert server.requests[1].start > 0
    assert leftovers_in(cache) == []


def test_a_server_that_falls_silent_does_not_outlast_the_time_limit(server):
    def fall_silent(handler, page):
        handler.serve(page, stop_after=100_000)
        handler.wfile.flush()
        time.sleep(25)

    url = server.put("/file", CONTENT, script=[fall_silent])
    began = time.monotonic()
    with pytest.raises(HoldfastError, match=r"100,000 of 1,000,000 bytes received within 1 s"):
        fetch(url, timeout=1)
    assert time.monotonic() - began < 20, "the stall limit of a transfer is 30 s"


def test_content_encoding_is_not_mistaken_for_content(server):
    """A server that compresses although the request excludes it, and one that only labels a compressed file."""
    packed = gzip.compress(CONTENT)
    url = server.put("/vocab.json", packed, headers={"Content-Encoding": "gzip"})
    assert fetch(url, sha256=sha256(CONTENT)).read_bytes() == CONTENT
    url = server.put("/vocab.json.gz", packed, headers={"Content-Encoding": "gzip"})
    assert fetch(url).read_bytes() == packed
    assert all(one.headers["accept-encoding"] == "identity" for one in server.requests)


def test_encoded_content_is_never_joined_from_pieces(server):
    packed = gzip.compress(CONTENT)
    url = server.put("/vocab.json", packed, headers={"Content-Encoding": "gzip"}, script=[stops_after(500_000)])
    assert fetch(url, sha256=sha256(CONTENT)).read_bytes() == CONTENT
    assert [one.status for one in server.requests][-1] == 200


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('attachment; filename="megatron_lm_345m_v0.0.zip"', "megatron_lm_345m_v0.0.zip"),
        ("attachment; filename*=UTF-8''w%C3%B6rter.txt", "wörter.txt"),
        ('attachment; filename="../../../etc/passwd"', "passwd"),
        ('attachment; filename="..\\\\..\\\\evil.dll"', "evil.dll"),
        ('attachment; filename=".record.json"', "record.json"),
        ('attachment; filename="/"', "download"),
        ("inline", "zip"),
    ],
)
def test_content_disposition_names_the_file_inside_its_folder(server, cache, header, name):
    url = server.put("/v0.0/zip", CONTENT, headers={"Content-Disposition": header})
    path = fetch(url)
    assert path.name == name and path.parent.parent == cache
    assert fetch(url) == path and len(server.requests) == 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/..%2f..%2f..%2fetc%2fpasswd", "/..%2f..%2f..%2fetc%2fpasswd"),
        ("/a/../../b", "/b"),
        ("/%2e%2e", "/%2e%2e"),
        ("/", "/"),
    ],
)
def test_a_url_that_climbs_does_not_leave_the_cache(server, cache, path, asked):
    server.put(asked, CONTENT)
    server.put(path, CONTENT)
    found = fetch(server.url(path))
    assert found.read_bytes() == CONTENT
    assert found.resolve().parent.parent == cache.resolve()


def test_a_file_of_another_length_than_in_the_catalog_is_refused_before_it_is_downloaded(server, cache, monkeypatch):
    url = server.put("/file", CONTENT, block_delay=0.2)
    monkeypatch.setitem(CATALOG, "known", CatalogEntry("a test", {"vocab": FileSpec(url, size=len(CONTENT) + 1)}))
    with pytest.raises(HoldfastError, match="the file has 1000000 bytes, not 1000001"):
        resolve("known")
    assert files_in(cache) == []


def test_proxies_are_used_and_exceptions_from_them_kept(server, monkeypatch):
    """The test server is the proxy: it sees the whole URL in the request line."""
    monkeypatch.setenv("HTTP_PROXY", server.url(""))
    server.put("http://files.example/vocab.json", CONTENT)
    assert fetch("http://files.example/vocab.json").read_bytes() == CONTENT
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.put("/direct", CONTENT)
    assert fetch(server.url("/direct")).read_bytes() == CONTENT
    assert [one.path for one in server.requests] == ["http://files.example/vocab.json", "/direct"]


def test_https_goes_through_its_proxy(server, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", server.url(""))
    with pytest.raises(HoldfastError, match=r"cannot fetch https://files\.example/vocab\.json"):
        fetch("https://files.example/vocab.json", timeout=20)
    assert server.requests[0].method == "CONNECT" and server.requests[0].path == "files.example:443"


def test_passwords_in_urls_are_neither_shown_nor_stored(server, cache):
    url = server.put("/file", CONTENT).replace("http://", "http://user:secret@")
    fetch(url)
    assert server.requests[0].headers["authorization"].startswith("Basic ")
    assert not any(b"secret" in path.read_bytes() for path in cache.rglob("*") if path.is_file())
    with pytest.raises(HoldfastError) as caught:
        fetch(url + "-missing")
    assert "secret" not in str(caught.value)
