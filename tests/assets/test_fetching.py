"""A fetched file: downloaded once, whole, checked, under a readable name; otherwise a clear error."""

import subprocess
import sys
import threading

import pytest

from holdfast import fetch
from holdfast.assets import catalog_files, resolve
from holdfast.assets.catalog import CATALOG, CatalogEntry, FileSpec
from holdfast.system.errors import HoldfastError, UsageError
from tests.assets.loopback import fails, sha256, some_bytes

CONTENT = some_bytes(300_000)


def files_in(folder):
    """Everything under a folder that a user would take for a file."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


def leftovers_in(folder):
    names = [path.name for path in folder.rglob(".*") if path.is_file()]
    return [name for name in names if name != ".record.json"]


def test_a_file_is_downloaded_once_and_keeps_its_name(server, cache):
    url = server.put("/models/gpt2-vocab.json", CONTENT)
    first, second = fetch(url), fetch(url)
    assert first == second and first.name == "gpt2-vocab.json"
    assert first.read_bytes() == CONTENT
    assert cache in first.parents
    assert len(server.requests) == 1
    assert files_in(cache) == [first] and leftovers_in(cache) == []


def test_the_cache_folder_is_the_given_one_then_holdfast_cache_then_megatron_cache(server, tmp_path, monkeypatch):
    url = server.put("/file", CONTENT)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "theirs"))
    assert tmp_path / "given" in fetch(url, cache_dir=tmp_path / "given").parents
    assert tmp_path / "ours" in fetch(url).parents
    monkeypatch.delenv("HOLDFAST_CACHE")
    assert tmp_path / "theirs" in fetch(url).parents


def test_two_urls_with_the_same_file_name_do_not_collide(server):
    one = fetch(server.put("/a/data.json", b"one"))
    two = fetch(server.put("/b/data.json", b"two"))
    three = fetch(server.put("/b/data.json?version=3", b"three"))
    assert (one.read_bytes(), two.read_bytes(), three.read_bytes()) == (b"one", b"two", b"three")
    assert one.name == two.name == three.name == "data.json"


def test_a_wrong_checksum_is_an_error_and_nothing_is_cached(server, cache):
    url = server.put("/file", CONTENT)
    with pytest.raises(HoldfastError, match=f"sha256 {sha256(CONTENT)}, not {'0' * 64}"):
        fetch(url, sha256="0" * 64)
    assert files_in(cache) == [] and not any(cache.rglob("*.part"))
    assert fetch(url, sha256=sha256(CONTENT)).read_bytes() == CONTENT


def test_a_cached_file_with_another_checksum_than_asked_for_is_not_given_out(server):
    url = server.put("/file", CONTENT)
    fetch(url)
    with pytest.raises(HoldfastError, match="remove"):
        fetch(url, sha256="0" * 64)


def test_the_first_download_records_a_checksum_that_later_ones_must_match(server):
    url = server.put("/file", CONTENT)
    path = fetch(url)
    path.unlink()
    server.put("/file", b"something else", etag='"v2"')
    with pytest.raises(HoldfastError, match="recorded at the first download"):
        fetch(url)
    assert not path.exists()
    server.pages.clear()
    with pytest.raises(HoldfastError, match="404 Not Found$"):
        fetch(url)
    server.put("/file", CONTENT)
    assert fetch(url).read_bytes() == CONTENT


def test_a_cached_file_that_lost_bytes_is_fetched_again(server):
    url = server.put("/file", CONTENT)
    path = fetch(url)
    path.write_bytes(CONTENT[:1000])
    assert fetch(url).read_bytes() == CONTENT


def test_offline_returns_what_is_cached_and_otherwise_names_the_folder(server, cache, monkeypatch):
    url = server.put("/file", CONTENT)
    path = fetch(url)
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    assert fetch(url) == path
    with pytest.raises(HoldfastError, match=f"offline: looked in {cache}"):
        fetch(server.put("/other", CONTENT))
    assert len(server.requests) == 1


def test_a_lease_time_that_is_no_number_is_wrong_usage(server, monkeypatch):
    monkeypatch.setenv("HOLDFAST_LEASE_SECONDS", "a minute")
    with pytest.raises(UsageError, match="HOLDFAST_LEASE_SECONDS"):
        fetch(server.put("/file", CONTENT))


def test_mirrors_are_asked_in_order(server, monkeypatch):
    first, second, third = (server.put(f"/{name}", CONTENT) for name in ("first", "second", "third"))
    server.pages["/first"].script = [fails(404)]
    server.pages["/second"].script = [fails(403)]
    wanted = FileSpec(first, (second, third), "file.json", len(CONTENT), sha256(CONTENT))
    monkeypatch.setitem(CATALOG, "mirrored", CatalogEntry("a test", {"vocab": wanted}))
    assert resolve("mirrored").read_bytes() == CONTENT
    assert [one.path for one in server.requests] == ["/first", "/second", "/third"]


def test_a_path_stays_itself_and_a_name_is_fetched(server, tmp_path, monkeypatch):
    local = tmp_path / "vocab.json"
    local.write_text("{}")
    assert resolve(local) == local
    assert resolve(str(local), "vocab") == local
    files = {role: FileSpec(server.put(f"/{role}", role.encode() * 9)) for role in ("vocab", "merges")}
    monkeypatch.setitem(CATALOG, "pair", CatalogEntry("a test", files))
    assert resolve("pair", "merges").read_bytes() == b"merges" * 9
    assert resolve("pair/vocab").read_bytes() == b"vocab" * 9
    assert {role: path.name for role, path in catalog_files("pair").items()} == {"vocab": "vocab", "merges": "merges"}
    with pytest.raises(UsageError, match="pair/vocab or pair/merges"):
        resolve("pair")
    with pytest.raises(HoldfastError, match=r"no file .*missing.json"):
        resolve(tmp_path / "missing.json")


def test_importing_assets_loads_no_http_library():
    heavy = ["httpx", "torch", "rich", "huggingface_hub", "platformdirs"]
    code = f"import sys, holdfast.assets; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_threads_of_one_process_share_one_download(server, cache):
    url = server.put("/file", b"x" * 500_000, latency=0.3)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(url, timeout=240))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8 and len(set(paths)) == 1 and len(server.requests) == 1
