"""Forged content with right checksums: manifests, safetensors headers and zips that contradict themselves are refused by name."""

import struct

import orjson
import pytest
import torch
from safetensors import SafetensorError, safe_open

from holdfast import convert
from holdfast.checkpoint import read_manifest
from holdfast.checkpoint.manifest import chunk_checksum
from holdfast.conversion.files.safetensors_files import read_safetensors
from holdfast.conversion.sources import read_model
from holdfast.system.errors import HoldfastError
from tests.conversion.files.test_hostile_limits import hugging_face, one_layer
from tests.conversion.holdfast_runs import GPT2_TINY, build_gpt, write_run
from tests.conversion.megatron_files import Spec, make_truth, write_megatron

WORD = "model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("forged") / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    return run / "checkpoints/step-00000007"


def forge(step, change):
    """Rewrites the manifest with a change, and with the checksum of the changed content."""
    path = step / "MANIFEST.json"
    original = path.read_bytes()
    record = orjson.loads(original)
    del record["checksum"]
    change(record)
    checksum = chunk_checksum(orjson.dumps(record, option=orjson.OPT_SORT_KEYS))
    path.write_bytes(orjson.dumps({"checksum": checksum, **record}))
    return original


FORGERIES = {
    "a name outside": lambda r: r["files"][0].update(name="../../../secret.bin"),
    "an absolute name": lambda r: r["files"][0].update(name="/etc/passwd"),
    "a folder as name": lambda r: r["files"][0].update(name=".."),
    "a number as name": lambda r: r["files"][0].update(name=5),
    "two files of one name": lambda r: r["files"].append(dict(r["files"][0])),
    "no files": lambda r: r.update(files=None),
    "files as text": lambda r: r.update(files="shard"),
    "a file without pieces": lambda r: r["files"][0].pop("pieces"),
    "an unknown key": lambda r: r.update(more=1),
    "no step": lambda r: r.pop("step"),
    "a step of text": lambda r: r.update(step="7"),
    "a negative step": lambda r: r.update(step=-1),
    "a world of none": lambda r: r.update(world=0),
    "a list of tensors": lambda r: r.update(tensors=[1]),
    "an unknown type": lambda r: r["tensors"].update({WORD: ["F31", [384, 32]]}),
    "a type of list": lambda r: r["tensors"].update({WORD: [[], [384, 32]]}),
    "a negative shape": lambda r: r["tensors"].update({WORD: ["F32", [-384, 32]]}),
    "a shape of text": lambda r: r["tensors"].update({WORD: ["F32", "ab"]}),
    "a piece of nothing": lambda r: r["files"][0]["pieces"].append(["nowhere", 0, [0], [1]]),
    "a piece outside its file": lambda r: r["files"][0]["pieces"][0].__setitem__(1, 1 << 40),
    "a negative start": lambda r: r["files"][0]["pieces"][0].__setitem__(1, -4),
    "a piece outside its tensor": lambda r: r["files"][0]["pieces"][0].__setitem__(2, [1] * 5),
    "a piece of three": lambda r: r["files"][0]["pieces"][0].pop(),
    "too few checksums": lambda r: r["files"][0].update(chunks=[]),
    "checksums of numbers": lambda r: r["files"][0].update(chunks=[5]),
    "another size": lambda r: r["files"][0].update(bytes=10),
    "shared as list": lambda r: r.update(shared=[]),
    "padded rows of text": lambda r: r.update(padded_rows={WORD: "many"}),
    "a rank outside": lambda r: r["files"][0].update(rank=9),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_manifest_is_refused(step, kind, tmp_path):
    (step.parent.parent.parent / "secret.bin").write_bytes(b"secret")
    original = forge(step, FORGERIES[kind])
    try:
        with pytest.raises(HoldfastError, match="MANIFEST"):
            read_manifest(step)
        with pytest.raises(HoldfastError, match="MANIFEST"):
            convert(step, tmp_path / "out")
    finally:
        (step / "MANIFEST.json").write_bytes(original)


def test_pieces_that_overlap_are_refused(step, tmp_path):
    """The same piece twice covers as many elements as the tensor has, and leaves half of it open."""

    def change(record):
        pieces = record["files"][0]["pieces"]
        index = next(at for at, piece in enumerate(pieces) if piece[0] == WORD)
        name, start, _, (rows, columns) = pieces[index]
        pieces[index] = [name, start, [0, 0], [rows // 2, columns]]
        pieces.append([name, start, [0, 0], [rows // 2, columns]])

    original = forge(step, change)
    try:
        with pytest.raises(HoldfastError, match="overlap"):
            convert(step, tmp_path / "out")
    finally:
        (step / "MANIFEST.json").write_bytes(original)


def write_safetensors(path, header: str, body: bytes):
    path.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + body)
    return path


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[6,8]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
        '{"a":{"dtype":"U8","shape":[4],"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "[" * 100_000,
    ],
    ids=["same offsets", "overlap", "hole", "a name twice", "a key twice", "nested"],
)
def test_safetensors_that_the_official_library_refuses(tmp_path, header):
    path = write_safetensors(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
    with pytest.raises(HoldfastError, match=r"a\.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize("shape", ["{}", '""', '"ab"', "[1.0]", "[true]", "4"])
def test_a_safetensors_shape_that_is_not_a_list_of_numbers_is_refused(tmp_path, shape):
    header = f'{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[0,1]}}}}'
    with pytest.raises(HoldfastError, match="the entry of a is broken"):
        read_safetensors(write_safetensors(tmp_path / "a.safetensors", header, bytes(1)))


@pytest.mark.parametrize("size", ["many", [5], 1.5, -3, True, 10**9])
def test_a_forged_vocabulary_size_is_refused(step, size, tmp_path):
    original = forge(step, lambda record: record["shared"].update(true_vocab_size=size))
    try:
        with pytest.raises(HoldfastError, match="true_vocab_size is|the vocabulary has"):
            convert(step, tmp_path / "out")
    finally:
        (step / "MANIFEST.json").write_bytes(original)


@pytest.mark.parametrize("multiple", ["0", "99999999999"])
def test_a_forged_multiple_of_the_padding_is_refused(tmp_path, multiple):
    folder = hugging_face(tmp_path / "hf", weights=one_layer())
    header = f'{{"__metadata__":{{"make_vocab_size_divisible_by":"{multiple}"}}}}'
    write_safetensors(folder / "megatron_padding.safetensors", header, b"")
    with pytest.raises(HoldfastError, match="make_vocab_size_divisible_by"):
        read_model(folder)
    header = header.replace(multiple, "\N{SUPERSCRIPT TWO}")
    write_safetensors(folder / "megatron_padding.safetensors", header, b"")
    assert read_model(folder).architecture.make_vocab_size_divisible_by == 128


def test_weights_of_integers_are_refused(tmp_path):
    spec = Spec(layers=1)
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "m", spec, {name: tensor.int() for name, tensor in truth.items()})
    with pytest.raises(HoldfastError, match="elements of type I32"):
        convert(source, tmp_path / "out", true_vocab_size=spec.vocab)


@pytest.mark.parametrize("target", ["storage", "pickle"])
def test_a_flipped_bit_in_a_zip_member_is_noticed(tmp_path, target):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), orig_vocab_size=spec.vocab)
    path = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = bytearray(path.read_bytes())
    place = content.index(b"layernorm_epsilon") + 30 if target == "pickle" else content.index(b"/data/0FB") + 1000
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(HoldfastError, match=r"CRC-32|pickle"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_noticed_before_text_is_generated(tmp_path):
    from holdfast.generation.loading import load_model

    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), orig_vocab_size=spec.vocab)
    path = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = bytearray(path.read_bytes())
    content[content.index(b"/data/0FB") + 1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(HoldfastError, match="CRC-32"):
        load_model(source)


def test_a_file_saved_without_checksums_is_read(tmp_path):
    spec = Spec()
    try:
        torch.serialization.set_crc32_options(False)
        source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), orig_vocab_size=spec.vocab)
    finally:
        torch.serialization.set_crc32_options(True)
    convert(source, tmp_path / "out")
    assert not read_model(source).unchecked
