"""Reads Megatron-core's torch_dist folders (torch's DCP format) without torch: `.metadata` as data, chunks as mapped views.

The invariant: every tensor is covered by its chunks exactly once, each chunk lies inside its file, and no path leaves the folder.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from holdfast.conversion.files.budget import Budget
from holdfast.conversion.files.pickles import InertObject, attributes, load_pickle, plain_attributes
from holdfast.conversion.files.torch_reader import StoredTensor, is_size, load_torch, torch_size
from holdfast.conversion.files.zips import Region, map_file
from holdfast.conversion.megatron.names import canonical_name
from holdfast.conversion.megatron.rank_files import iteration_folder
from holdfast.conversion.megatron.read import megatron_model, split_gate
from holdfast.conversion.megatron.settings import check_settings
from holdfast.conversion.model import MAX_LAYERS, WORD_EMBEDDINGS, Model
from holdfast.conversion.tensors import MatrixPiece, Tensor
from holdfast.system.bounded_files import read_json
from holdfast.system.errors import HoldfastError

_CHUNK_FILE = re.compile(r"^[A-Za-z0-9_.-]+\.distcp$")
_NOT_WEIGHTS = re.compile(
    r"^(optimizer|chained_\d+|rng_state|rerun_state_machine|opt_param_scheduler|args|iteration|checkpoint_version|content_metadata|common|num_floating)"
)
MAX_METADATA_BYTES = 1 << 20
MAX_CHUNKS = 1 << 19
"""Of all tensors. Honest ones take several opcodes each, and the limit of those is reached first."""
Box = tuple[tuple[int, ...], tuple[int, ...]]


def is_torch_dist(path: Path) -> bool:
    folder = iteration_folder(path)
    return (folder / ".metadata").is_file()


def refuse_other_formats(path: Path) -> None:
    """Refuses, by name, Megatron's distributed checkpoints that are not whole torch_dist folders."""
    folder = iteration_folder(path)
    if (folder / "metadata.json").is_file():
        backend = read_json(folder / "metadata.json", MAX_METADATA_BYTES, "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise HoldfastError(
                f"{folder} is a Megatron checkpoint of the format {backend!r}; of Megatron's distributed formats Holdfast reads "
                "torch_dist: load it with Megatron-LM, and save it with --ckpt-format torch_dist"
            )
    if any(folder.glob("*.distcp")):
        raise HoldfastError(
            f"{folder} has *.distcp files, but no .metadata: the save was not completed; use an earlier iteration"
        )


def read_torch_dist(path: Path, heads: int | None, ignored: Collection[str]) -> Model:
    folder = iteration_folder(path)
    reader = DistributedCheckpoint(folder)
    args, common = read_args(folder, reader)
    named = {name: name.removeprefix("model.") for name in reader.chunks if not _NOT_WEIGHTS.match(name)}
    bert = any("tokentype" in name for name in named)
    stack = "encoder" if bert else "decoder"
    tensors = _tensors(reader, named, stack, folder)
    if args.get("swiglu") is True:
        tensors = {
            new: tensor
            for name, whole in tensors.items()
            for new, tensor in (split_gate(name, [whole]) if ".linear_fc1." in name else {name: whole}).items()
        }
    width = args.get("tensor_model_parallel_size")
    return megatron_model(
        folder,
        tensors,
        args,
        model_type="bert" if bert else "gpt",
        mcore=True,
        width=width if type(width) is int else 1,
        heads=heads,
        notes=check_settings(args, ignored),
        origin="Megatron torch_dist",
        iteration=common.get("iteration"),
        facts={
            "kind": "torch_dist",
            "checkpoint_version": 3.0,
            "chunk_files": len(reader.files),
            "args": bool(args),
            "optimizer": any(name.startswith(("optimizer", "chained")) for name in reader.shapes),
            "objects_not_loaded": sorted(reader.names),
        },
        regions=list(reader.files.values()),
        unchecked=reader.budget.unchecked,
    )


def _tensors(reader: "DistributedCheckpoint", named: Mapping[str, str], stack: str, folder: Path) -> dict[str, Tensor]:
    """Canonical tensors; stacks of layers taken apart."""
    tensors: dict[str, Tensor] = {}
    for name, plain in named.items():
        canonical = canonical_name(plain, stack)
        if canonical is None:
            continue
        if re.match(rf"{stack}\.layers\.\D", canonical):
            rest = canonical.removeprefix(f"{stack}.layers.")
            layers = reader.shapes[name][0] if len(reader.shapes[name]) > 1 else MAX_LAYERS + 1
            if layers > MAX_LAYERS or layers * len(reader.chunks[name]) > MAX_LAYERS * 1000:
                raise HoldfastError(
                    f"{folder}: {name} has the shape {reader.shapes[name]}, which no stack of layers has"
                )
            for layer in range(layers):
                tensors[f"{stack}.layers.{layer}.{rest}"] = reader.tensor(name, layer)
        else:
            tensors[canonical] = reader.tensor(name)
            if not tensors[canonical].shape:
                raise HoldfastError(f"{folder}: {name} is a single number, where weights are expected")
    if WORD_EMBEDDINGS not in tensors:
        raise HoldfastError(f"{folder}: {WORD_EMBEDDINGS} is missing")
    return tensors


def read_args(folder: Path, reader: "DistributedCheckpoint") -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Megatron's args: in common.pt, or in newer folders as a byte entry of their own."""
    if (folder / "common.pt").is_file():
        common = load_torch(map_file(folder / "common.pt"), reader.budget).tree
        if not isinstance(common, dict):
            raise HoldfastError(f"{folder / 'common.pt'} does not hold the state of a checkpoint")
        return plain_attributes(common.get("args")), common
    state: dict[str, Any] = {}
    for name in reader.blobs:
        key = name.split("/")[0].rsplit(".", 1)[-1]
        if key in ("args", "iteration", "checkpoint_version", "common", "common_state_dict"):
            value = load_torch(reader.region(name), reader.budget).tree
            state |= value if isinstance(value, dict) and key.startswith("common") else {key: value}
    return plain_attributes(state.get("args")), state


class DistributedCheckpoint:
    """The index of a DCP folder: which chunk of which tensor lies where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.budget = Budget()
        self._loaded: dict[int, StoredTensor] = {}
        self.files: dict[str, Region] = {}
        self.chunks: dict[str, list[tuple[Box, InertObject]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.blobs: dict[str, InertObject] = {}
        region = map_file(folder / ".metadata")
        try:
            tree, _, names = load_pickle(region.data, self.budget, {"torch.Size": torch_size})
        except HoldfastError as error:
            raise HoldfastError(f"{folder / '.metadata'}: {error}") from None
        self.names = {name for name in names if not name.startswith("torch.")}
        state = attributes(tree)
        entries, storage = state.get("state_dict_metadata"), state.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise HoldfastError(f"{folder / '.metadata'} does not describe a distributed checkpoint")
        self._index(entries, storage)

    def _index(self, entries: dict[Any, Any], storage: dict[Any, Any]) -> None:
        places: dict[tuple[str, tuple[int, ...]], InertObject] = {}
        for key, info in storage.items():
            where = attributes(key)
            name = where.get("fqn")
            if isinstance(name, str) and isinstance(info, InertObject):
                if isinstance(entries.get(name), InertObject) and entries[name].name.endswith("BytesStorageMetadata"):
                    self.blobs[name] = info
                else:
                    places[name, _sizes(where.get("offset"), self._folder)] = info
        chunks = 0
        for name, entry in entries.items():
            if not isinstance(name, str) or name in self.blobs or not isinstance(entry, InertObject):
                continue
            described = attributes(entry)
            if not isinstance(described.get("chunks"), list):
                continue
            self.shapes[name] = _sizes(described.get("size"), self._folder)
            chunks += len(described["chunks"])
            if chunks > MAX_CHUNKS:
                raise HoldfastError(f"{self._folder} has more than {MAX_CHUNKS:,} chunks, the most that are read")
            found: list[tuple[Box, InertObject]] = []
            for box in map(attributes, described["chunks"]):
                offsets, sizes = _sizes(box.get("offsets"), self._folder), _sizes(box.get("sizes"), self._folder)
                if (name, offsets) not in places:
                    raise HoldfastError(f"{self._folder}: a chunk of {name} is in no file")
                found.append(((offsets, sizes), places[name, offsets]))
            self.chunks[name] = found

    def region(self, name: str) -> Region:
        return self._region(self.blobs[name], name)

    def _region(self, info: InertObject, name: str) -> Region:
        where = attributes(info)
        file, at, length = (where.get(key) for key in ("relative_path", "offset", "length"))
        if type(at) is not int or type(length) is not int or not isinstance(file, str) or not _CHUNK_FILE.match(file):
            raise HoldfastError(f"{self._folder}: the place of {name} is broken or outside the folder")
        if where.get("transform_descriptors"):
            raise HoldfastError(
                f"{self._folder}: {name} is stored with a transformation (compression), which is not supported"
            )
        if file not in self.files:
            if not (self._folder / file).is_file():
                raise HoldfastError(f"{self._folder / file} is missing")
            self.files[file] = map_file(self._folder / file)
        return self.files[file].part(at, length, f"{self._folder / file}: {name}")

    def load(self, info: InertObject, name: str) -> StoredTensor:
        """A chunk's tensor; a chunk that holds several layers is loaded once."""
        region = self._region(info, name)
        if id(info) not in self._loaded:
            stored = load_torch(region, self.budget).tree
            if not isinstance(stored, StoredTensor):
                raise HoldfastError(f"{self._folder}: a chunk of {name} is not the tensor that .metadata announces")
            self._loaded[id(info)] = stored
        return self._loaded[id(info)]

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A whole tensor, or one layer of a stack of them."""
        shape = self.shapes[name] if layer is None else self.shapes[name][1:]
        if len(shape) > 2:
            raise HoldfastError(f"{self._folder}: {name} has the shape {list(self.shapes[name])}, which no weight has")
        pieces, dtype = [], ""
        for (offsets, sizes), info in self.chunks[name]:
            if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            stored = self.load(info, name)
            if stored.shape != sizes or (dtype and stored.dtype != dtype):
                raise HoldfastError(f"{self._folder}: a chunk of {name} is not the tensor that .metadata announces")
            dtype, bits = stored.dtype, stored.view()
            place = offsets
            if layer is not None:
                bits, place = bits[layer - offsets[0]], offsets[1:]
            bits = bits.reshape(-1, 1) if bits.ndim < 2 else bits
            pieces.append(MatrixPiece(place[0] if place else 0, place[1] if len(place) > 1 else 0, bits))
        tensor = Tensor(shape, dtype, tuple(pieces), dtype)
        if not pieces or not tensor.is_tiled():
            raise HoldfastError(f"{self._folder}: the chunks of {name} do not cover it exactly")
        return tensor


def _sizes(value: Any, folder: Path) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 8 or not all(map(is_size, value)):
        raise HoldfastError(f"{folder / '.metadata'} holds a broken shape or offset")
    return value
