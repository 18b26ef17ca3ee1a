"""Small files in a fetch cache, under the names and addresses of published ones."""

import hashlib
from pathlib import Path

from holdfast.assets.cache import CacheRecord, entry_of
from holdfast.assets.catalog import file_specs


def put_into_cache(cache: Path, name: str, contents: dict[str, bytes]) -> None:
    """Stores content by role, as if it had been downloaded from the address of a catalog name or URL."""
    for role, content in contents.items():
        spec = file_specs(name)[role]
        entry = entry_of(cache, spec.url)
        entry.folder.mkdir(parents=True)
        part = entry.folder / ".content"
        part.write_bytes(content)
        file = spec.name or spec.url.rpartition("/")[2]
        digest = spec.sha256 or hashlib.sha256(content).hexdigest()
        entry.publish(part, CacheRecord(spec.url, file, len(content), digest))
