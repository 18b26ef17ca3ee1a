"""What the ranks of a run share: claims, one status page per rank, collective decisions, stop signals."""
