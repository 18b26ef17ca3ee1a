"""A shard's bytes: what the safetensors library reads out of them, and what a broken header leads to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from holdfast.checkpoint.layout import PAGE, TensorSlice, lay_out, read_layout
from holdfast.system.errors import HoldfastError

pieces = st.lists(
    st.tuples(st.sampled_from(["F32", "I64", "U8", "F16"]), st.lists(st.integers(1, 5), max_size=3)),
    min_size=1,
    max_size=6,
)
TYPES = {"F32": np.float32, "I64": np.int64, "U8": np.uint8, "F16": np.float16}


@given(pieces)
@settings(max_examples=30, deadline=None)
def test_the_safetensors_library_reads_what_was_laid_out(tmp_path_factory, drawn):
    made = [
        TensorSlice(f"p{i}", dtype, tuple(n + 3 for n in shape), (1,) * len(shape), tuple(shape))
        for i, (dtype, shape) in enumerate(drawn)
    ]
    layout = lay_out(made)
    rng = np.random.default_rng(0)
    content = bytearray(layout.header.ljust(layout.size, b"\0"))
    values = {}
    for piece, start in zip(layout.pieces, layout.starts, strict=True):
        assert start % np.dtype(TYPES[piece.dtype]).itemsize == 0
        values[piece.name] = rng.integers(0, 100, piece.shape).astype(TYPES[piece.dtype])
        content[start : start + piece.nbytes] = values[piece.name].tobytes()
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    path.write_bytes(content)
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == sorted(values)
        for name, value in values.items():
            assert (file.get_tensor(name) == value).all()
    assert len(layout.header) % PAGE == 0
    back = read_layout(memoryview(content), "a")
    assert (back.pieces, back.starts, back.size) == (layout.pieces, layout.starts, layout.size)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_broken_header_is_an_error_that_names_the_file(content):
    with pytest.raises(HoldfastError, match=r"some\.file"):
        read_layout(memoryview(content), "some.file")
