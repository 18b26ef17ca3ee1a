"""The run folder: claiming and opening it, what identifies the run, its absolute paths, and its result."""
