"""Mechanics written once and used by every package: atomic files, journals, processes, leases, progress, errors."""
