"""What the ranks of a run share: one status page per rank, collective decisions, stop signals."""
