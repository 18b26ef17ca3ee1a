"""Where bytes come from: http(s), a file, the Hugging Face hub, S3. Each source opens a stream at an offset.

The invariant: a stream that starts at an offset other than 0 continues exactly the file that `ResumePoint` describes; a source
that cannot guarantee it starts from 0. The exception's type decides what follows: retry after `TransientError`, start from byte
0 after `NotResumable`, try a mirror after `SourceError`.
"""

import functools
import os
import re
import stat
import urllib.parse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from holdfast.assets.cache import name_in_url, safe_name
from holdfast.system.errors import UsageError

if TYPE_CHECKING:
    import ssl

    import httpx

CHUNK = 1 << 18
S3_BLOCK = 8 << 20
CONNECT_SECONDS = 15.0
STALL_SECONDS = 30.0
COMPRESSED = {"gzip": (".gz", ".tgz"), "x-gzip": (".gz", ".tgz"), "deflate": (".zz",)}


class SourceError(Exception):
    """This source does not have the file; a mirror may."""


class TransientError(Exception):
    """The same request may succeed later, after `after` seconds where the server states them."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class NotResumable(Exception):
    """The bytes so far do not belong to the file that the server has now."""


@dataclass(frozen=True)
class ResumePoint:
    """Where to continue. Without a validator the caller checks the result by its checksum."""

    offset: int
    validator: str | None


@dataclass
class Stream:
    chunks: Iterator[bytes]
    offset: int = 0
    length: int | None = None
    """Of the whole file, where the server states it."""
    validator: str | None = None
    name: str | None = None
    sha256: str | None = None
    resumable: bool = True


def open_source(url: str, resume: ResumePoint | None, time_left: float) -> AbstractContextManager[Stream]:
    """Opens a stream of the file's bytes. `time_left`: seconds until the caller's deadline, which limits every wait."""
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme == "file":
        return open_file(url, resume)
    if scheme == "s3":
        return open_s3(url, resume)
    return open_hub(url, resume, time_left) if scheme == "hf" else open_http(url, resume, time_left, {})


@contextmanager
def open_http(url: str, resume: ResumePoint | None, time_left: float, headers: dict[str, str]) -> Iterator[Stream]:
    import httpx  # 60 ms and more: only the process that downloads imports it

    sent = {"Accept-Encoding": "identity", "User-Agent": "holdfast", **headers}
    if resume:
        sent["Range"] = f"bytes={resume.offset}-"
        if resume.validator:
            sent["If-Range"] = resume.validator
    time_left = max(time_left, 0.1)
    limits = httpx.Timeout(min(STALL_SECONDS, time_left), connect=min(CONNECT_SECONDS, time_left))
    try:
        with httpx.stream(
            "GET", url, headers=sent, follow_redirects=True, timeout=limits, verify=_trusted_authorities()
        ) as response:
            _check_status(response, resume)
            yield _http_stream(response, url)
    except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise SourceError(f"its certificate is not trusted: {error}") from error
        raise TransientError(str(error) or type(error).__name__) from error
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, UnicodeError) as error:  # UnicodeError: of a host's name
        raise SourceError(str(error) or type(error).__name__) from error


@functools.cache
def _trusted_authorities() -> "ssl.SSLContext":
    """Reading the authorities takes 50 ms: once for all retries and files."""
    import httpx

    return httpx.create_ssl_context()


def _check_status(response: "httpx.Response", resume: ResumePoint | None) -> None:
    status = response.status_code
    if status == 200 or (status == 206 and resume):
        return
    if status == 416 and resume:
        raise NotResumable
    answer = f"{status} {response.reason_phrase}".strip()
    if status in (408, 425, 429) or status >= 500:
        raise TransientError(f"the server answered {answer}", retry_after(response.headers.get("Retry-After")))
    raise SourceError(f"the server answered {answer}")


def retry_after(value: str | None) -> float | None:
    """Seconds to wait from a Retry-After header, which holds seconds or a date."""
    if not value:
        return None
    if value.strip().isdecimal():
        return float(value)
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _http_stream(response: "httpx.Response", url: str) -> Stream:
    headers = response.headers
    etag = headers.get("ETag", "")
    stream = Stream(
        response.iter_raw(),
        length=int(headers["Content-Length"]) if headers.get("Content-Length", "").isdigit() else None,
        # A weak ETag does not guarantee identical bytes, which Range needs.
        validator=etag if etag and not etag.startswith("W/") else headers.get("Last-Modified"),
        name=_disposition_name(headers.get("Content-Disposition")),
    )
    if response.status_code == 206:
        stated = re.match(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        if not stated:
            raise NotResumable
        stream.offset = int(stated[1])
        stream.length = int(stated[2]) if stated[2] != "*" else None
    encoding = headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity" or name_in_url(url).endswith(COMPRESSED.get(encoding, ())):
        # Some servers label a .gz file as gzip-encoded; the compressed file is the requested one.
        return stream
    if encoding not in COMPRESSED:
        raise SourceError(f"the server sends '{encoding}'-encoded content, which the request excluded")
    if stream.offset:
        raise NotResumable
    # Length and offsets count encoded bytes, so they do not apply to the decoded file.
    stream.chunks, stream.length, stream.resumable = response.iter_bytes(), None, False
    return stream


def _disposition_name(header: str | None) -> str | None:
    if not header:
        return None
    from email.message import Message

    message = Message()
    message["Content-Disposition"] = header
    name = message.get_filename()
    return safe_name(name) if name else None


@contextmanager
def open_file(url: str, resume: ResumePoint | None) -> Iterator[Stream]:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise SourceError(f"file URLs name a file of this machine: file:///path, not file://{parts.netloc}/path")
    path = urllib.parse.unquote(parts.path)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("it is not a file")
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SourceError(str(error.strerror)) from error
    except ValueError as error:  # a zero byte
        raise SourceError(str(error)) from error
    with open(descriptor, "rb") as file:
        validator = f"{status.st_mtime_ns}-{status.st_size}"
        offset = resume.offset if resume and resume.validator == validator else 0
        file.seek(offset)
        yield Stream(_read(file), offset, status.st_size, validator)


def _read(file: BinaryIO) -> Iterator[bytes]:
    try:
        while chunk := file.read(CHUNK):
            yield chunk
    except Exception as error:  # S3 clients raise exceptions of many types
        raise TransientError(str(error) or type(error).__name__) from error


def _hub_address(url: str) -> tuple[str, str, str, str | None]:
    """Repository type, repository, file and revision of `hf://[datasets/|spaces/]org/repo[@revision]/path`."""
    path = urllib.parse.unquote(url.removeprefix("hf://"))
    kind = "model"
    for plural in ("datasets", "spaces", "models"):
        if path.startswith(plural + "/"):
            kind, path = plural.removesuffix("s"), path.removeprefix(plural + "/")
    pieces = path.split("/", 2)
    if len(pieces) < 3 or not all(pieces):
        raise UsageError(f"{url} should look like hf://org/repo/file (or hf://datasets/org/repo/file)")
    repository, _, revision = f"{pieces[0]}/{pieces[1]}".partition("@")
    return kind, repository, pieces[2], revision or None


@contextmanager
def open_hub(url: str, resume: ResumePoint | None, time_left: float) -> Iterator[Stream]:
    """huggingface_hub provides the endpoint, the user's token and the file's metadata. The bytes go to our part, so that the
    next holder of the lease can continue them, and no lock of the hub's own cache is needed."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    kind, repository, path, revision = _hub_address(url)
    address = huggingface_hub.hf_hub_url(repository, path, repo_type=kind, revision=revision)
    try:
        etag = huggingface_hub.get_hf_file_metadata(address).etag
    except GatedRepoError as error:
        raise SourceError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"the hub has no {kind} {repository} (if it is private, set HF_TOKEN)") from error
    except EntryNotFoundError as error:
        raise SourceError(f"{repository} has no file {path}") from error
    except Exception:
        etag = None  # a hub that does not answer HEAD may still answer GET, which is retried
    token = huggingface_hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with open_http(address, resume, time_left, headers) as stream:
        stream.name = name_in_url(url)
        # For large files the hub's ETag is the sha256 of the content.
        stream.sha256 = etag if etag and re.fullmatch(r"[0-9a-f]{64}", etag) else None
        yield stream


@contextmanager
def open_s3(url: str, resume: ResumePoint | None) -> Iterator[Stream]:
    try:
        import fsspec

        store: Any = fsspec.filesystem("s3")
    except ImportError as error:
        raise SourceError("s3:// needs fsspec with S3 support: pip install s3fs") from error
    path = url.removeprefix("s3://")
    try:
        about = store.info(path)
        file = store.open(path, "rb", block_size=S3_BLOCK)
    except (TimeoutError, ConnectionError) as error:
        raise TransientError(str(error)) from error
    except Exception as error:
        raise SourceError(str(error) or type(error).__name__) from error
    with file:
        validator = str(about.get("ETag") or about.get("LastModified") or "") or None
        offset = resume.offset if resume and validator and resume.validator == validator else 0
        file.seek(offset)
        yield Stream(_read(file), offset, about["size"], validator)
