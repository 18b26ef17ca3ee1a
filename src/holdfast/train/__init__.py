"""Training: the loop and what it is made of. `torchrun -m holdfast.train CONFIG.toml` is one rank of it."""
