"""Checks before the ranks start: ranges, configuration, data, host; and the description of a layout for --dry-run."""
