"""The run's memory on this node: arenas with slots, checksums, the copy into them."""
