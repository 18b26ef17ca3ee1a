"""Files that a run needs, downloaded into a cache exactly once however many processes ask."""

from holdfast.assets.fetching import Fetched, catalog_files, fetch, resolve

__all__ = ["Fetched", "catalog_files", "fetch", "resolve"]
