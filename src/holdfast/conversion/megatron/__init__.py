"""Megatron checkpoints: args, tensor names, rank files and torch_dist, reading and writing."""
