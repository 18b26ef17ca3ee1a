"""Small state comes back exactly as it was, or is refused."""

import math
import random

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.json_state import decode, encode
from holdfast.snapshot.memory.small_state import random_state, set_random_state

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_everything_accepted_comes_back(value):
    assert decode(orjson.loads(orjson.dumps(encode(value)))) == value


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1 << 70, -(1 << 64), "\ud800", {"\udfff": 1}, True])
def test_what_json_cannot_express_comes_back(value):
    back = decode(orjson.loads(orjson.dumps(encode([value]))))
    assert back == [value] and type(back[0]) is type(value)


def test_not_a_number_stays_one():
    assert math.isnan(decode(orjson.loads(orjson.dumps(encode({"best": float("nan")}))))["best"])


def test_tensors_and_arrays_come_back_with_dtype_and_shape():
    for tensor in (torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), torch.tensor(3.5), torch.empty(0, 2)):
        back = decode(encode(tensor))
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    array = np.arange(4, dtype=np.uint32).reshape(2, 2)
    back = decode(encode(array))
    assert back.dtype == array.dtype and (back == array).all()


def test_random_generators_continue_where_they_were():
    saved = encode(random_state())
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()
    set_random_state(decode(saved))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted
