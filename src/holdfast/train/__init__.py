"""Training: `command` starts and supervises the ranks of a node, `loop` is what each rank runs.

`torchrun -m holdfast.train CONFIG.toml` runs one rank without the supervisor.
"""
