"""Sources that are not plain http: files, the Hugging Face hub, S3."""

import hashlib
import os
import subprocess
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast import fetch
from holdfast.assets.sources import retry_after
from holdfast.system.errors import HoldfastError, UsageError
from tests.assets.loopback import fails, some_bytes, stops_after
from tests.assets.test_fetching import files_in

CONTENT = some_bytes(500_000)


def test_a_file_url_is_copied_into_the_cache(tmp_path, cache):
    source = tmp_path / "my vocab.json"
    source.write_bytes(CONTENT)
    path = fetch(source.as_uri())
    assert path.read_bytes() == CONTENT and path.name == "my vocab.json" and cache in path.parents
    source.unlink()
    assert fetch(source.as_uri()) == path


def test_a_missing_file_url_is_a_clear_error(tmp_path):
    with pytest.raises(HoldfastError, match="No such file"):
        fetch((tmp_path / "missing").as_uri())
    with pytest.raises(HoldfastError, match="it is not a file"):
        fetch(tmp_path.as_uri())
    with pytest.raises(HoldfastError, match="file of this machine"):
        fetch("file://host/path")


def test_an_unknown_scheme_is_wrong_usage(cache):
    with pytest.raises(UsageError, match="none of http, https, file, hf, s3"):
        fetch("ftp://files.example/x")
    assert not cache.exists()


HUB = "/org/repo/resolve/main/sub/vocab.json"


@pytest.mark.parametrize("url", ["http://[::1", "http://a@[b/x", "http://127.0.0.1:9/\udcff", "http://h:x:y]/"])
def test_a_url_that_is_none_is_wrong_usage(cache, url):
    with pytest.raises(UsageError, match="not a valid URL"):
        fetch(url)


@pytest.mark.parametrize("url", ["file:///tmp/%00x", "http://xn--a/x", "http://127.0.0.1:abc/x"])
def test_a_url_that_no_file_can_have_is_an_error_of_one_line(cache, url):
    with pytest.raises(HoldfastError, match="^cannot fetch"):
        fetch(url)


def fetch_from_hub(server, url: str) -> subprocess.CompletedProcess:
    """In a process of its own: huggingface_hub reads its endpoint when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": server.url(""), "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "holdfast.cli", "fetch", url]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("checksum", ["right", "wrong"])
def test_the_hub_is_asked_with_the_users_token_and_its_checksum_counts(server, cache, checksum):
    etag = hashlib.sha256(CONTENT if checksum == "right" else b"else").hexdigest()
    commit = {"X-Repo-Commit": "0" * 40}
    server.put(HUB, CONTENT, etag=f'"{etag}"', headers=commit)
    done = fetch_from_hub(server, "hf://org/repo/sub/vocab.json")
    gets = server.gets(HUB)
    assert len(gets) == 1 and gets[0].headers["authorization"] == "Bearer hf_secret"
    if checksum == "right":
        (path,) = files_in(cache)
        assert done.stdout.strip() == str(path) and path.name == "vocab.json" and path.read_bytes() == CONTENT
    else:
        assert done.returncode == 1 and f"not {etag}" in done.stderr and files_in(cache) == []


def test_a_hub_transfer_that_breaks_is_continued(server, cache):
    server.put(HUB, CONTENT, headers={"X-Repo-Commit": "0" * 40})
    head_then_break = [lambda handler, page: handler.serve(page), stops_after(200_000)]
    server.pages[HUB].script = head_then_break
    done = fetch_from_hub(server, "hf://org/repo@main/sub/vocab.json")
    assert done.returncode == 0, done.stderr
    assert [one.start for one in server.gets(HUB)] == [0, 200_000]


def test_a_file_that_the_hub_does_not_have_is_an_error_of_one_line(server):
    missing = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": "0" * 40}
    server.put(HUB, CONTENT, script=[fails(404, **missing)])
    done = fetch_from_hub(server, "hf://org/repo/sub/vocab.json")
    assert done.returncode == 1 and "org/repo has no file sub/vocab.json" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    done = fetch_from_hub(server, "hf://org/repo")
    assert done.returncode == 2 and "hf://org/repo/file" in done.stderr


class Bucket(MemoryFileSystem):
    """S3 as fsspec shows it, in memory."""

    protocol = "s3"
    store: dict = {}  # noqa: RUF012

    def info(self, path, **options):
        return {**super().info(path, **options), "ETag": '"one"'}


@pytest.fixture
def bucket():
    fsspec.register_implementation("s3", Bucket, clobber=True)
    yield Bucket()
    fsspec.registry.target.pop("s3") if hasattr(fsspec.registry, "target") else None
    Bucket.store.clear()


def test_s3_goes_through_fsspec(bucket):
    bucket.pipe("/data/corpus/part-0.jsonl", CONTENT)
    path = fetch("s3://data/corpus/part-0.jsonl")
    assert path.name == "part-0.jsonl" and path.read_bytes() == CONTENT
    with pytest.raises(HoldfastError, match="part-1"):
        fetch("s3://data/corpus/part-1.jsonl")


def test_s3_without_s3fs_names_the_package_to_install(tmp_path):
    code = """
import sys
sys.modules["s3fs"] = None
from holdfast import fetch
fetch("s3://data/corpus/part-0.jsonl")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "pip install s3fs" in done.stderr


def test_retry_after_reads_seconds_and_dates_and_nothing_else():
    assert retry_after("120") == 120
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("soon") is None and retry_after(None) is None and retry_after("\N{SUPERSCRIPT TWO}") is None
