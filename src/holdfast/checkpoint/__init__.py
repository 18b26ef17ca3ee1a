"""Training state on disk: safetensors shards with global names and offsets, and a manifest written last.

    state = State(model, optimizer, shared={"iteration": 100}, per_rank={"rng": ...})
    path = save("runs/a/checkpoints", step=100, state=state, keep_last=3)    # collective: every rank calls it
    shared = load(path, state)                                               # any world size, any layout
    path, shared = load_newest("runs/a", state) or (None, {})                # falls back past damaged checkpoints

    with open_checkpoint(path) as checkpoint:                                # no torch: numpy arrays out of mapped files
        weight = checkpoint.tensor("model.embedding.word_embeddings.weight")

`State` defines what a checkpoint contains: `models` (a module, or the list of this rank's pipeline stages, whose names
are global), `optimizers`, `shared` (JSON, the same on all ranks) and `per_rank` (JSON, different on each). Tensors are named
`model.<parameter>` and `optimizer.<parameter>.<key>`. A plain tensor is replicated over all ranks that hold its name
(within the `replica_group`, if one is given); a DTensor is where its placements put it.
`padded_rows={"embedding.word_embeddings.weight": 50257}` marks a parameter whose rows beyond 50257 are padding: it loads
with any other padding, whose rows become zero.

The invariants: a folder called `step-NNNNNNNN` is complete (it appears by rename); every byte of it is covered by a
checksum in its manifest, and every byte that `load` puts into a tensor was verified; nothing in it is pickled. Names
load at first use, so that reading a checkpoint needs no torch.
"""

from typing import TYPE_CHECKING

from holdfast.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.checkpoint.folder import newest as newest
    from holdfast.checkpoint.loading import load as load
    from holdfast.checkpoint.loading import load_newest as load_newest
    from holdfast.checkpoint.manifest import Manifest as Manifest
    from holdfast.checkpoint.manifest import read_manifest as read_manifest
    from holdfast.checkpoint.reader import Checkpoint as Checkpoint
    from holdfast.checkpoint.reader import open_checkpoint as open_checkpoint
    from holdfast.checkpoint.state import State as State
    from holdfast.checkpoint.writing import save as save

_HOMES = {
    "State": "holdfast.checkpoint.state",
    "save": "holdfast.checkpoint.writing",
    "load": "holdfast.checkpoint.loading",
    "load_newest": "holdfast.checkpoint.loading",
    "newest": "holdfast.checkpoint.folder",
    "Manifest": "holdfast.checkpoint.manifest",
    "read_manifest": "holdfast.checkpoint.manifest",
    "Checkpoint": "holdfast.checkpoint.reader",
    "open_checkpoint": "holdfast.checkpoint.reader",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
