"""Files of a run folder that training reads and writes, besides checkpoints and metrics."""
