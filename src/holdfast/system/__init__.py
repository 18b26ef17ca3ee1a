"""Mechanics written once and used by every package: leases, and the claim of a run folder."""
