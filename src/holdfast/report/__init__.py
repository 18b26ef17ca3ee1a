"""A run folder as one HTML page, and as the facts that `holdfast inspect` prints."""
