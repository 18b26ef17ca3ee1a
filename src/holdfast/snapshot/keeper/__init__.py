"""The keeper: the process that outlives the trainer, writes checkpoints and replicates slots to peer nodes."""
