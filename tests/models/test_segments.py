"""Attention inside documents and windows against a dense mask, against each document alone, and its memory."""

import pytest
import torch
from torch.nn import functional as F

from holdfast.config import ModelConfig
from holdfast.models.gpt import GPT
from holdfast.models.segments import Scores, Segments, visible
from tests.models.families import FAMILIES

BATCH, TOKENS = 3, 40


def documents(generator, batch=BATCH, tokens=TOKENS, share=0.15):
    return (torch.rand(batch, tokens, generator=generator) < share).cumsum(1)


@pytest.mark.parametrize("window", [(), (7, 0), (1, 0), (100, 0)])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("block", [512, 5])
def test_attention_equals_a_dense_mask(window, groups, block, monkeypatch):
    monkeypatch.setattr("holdfast.models.segments.BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(BATCH, 4, TOKENS, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(BATCH, groups, TOKENS, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    places = torch.arange(TOKENS)
    for numbers in (documents(generator), documents(generator, share=0.7), torch.zeros(BATCH, TOKENS).long()):
        mask = visible(places, places, window) & (numbers[:, None, :, None] == numbers[:, None, None, :])
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=groups < 4)
        torch.testing.assert_close(Segments.of(numbers, window).attend(query, key, value), expected, rtol=0, atol=1e-13)
    rows = Segments.rows(BATCH, TOKENS, window, query.device)
    torch.testing.assert_close(rows.attend(query, key, value), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scores_equal_those_of_the_kernel_unless_they_are_bounded(softcap):
    """Additive and boolean masks, and none, against the definition; without a bound and with one that changes them."""
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    places = torch.arange(9)
    mask = visible(places, places, ())
    products = torch.einsum("bghtd,bgsd->bghts", query.unflatten(1, (2, 2)), key) * 0.7
    bounded = softcap * torch.tanh(products / softcap) if softcap else products
    weights = bounded.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = torch.einsum("bghts,bgsd->bghtd", weights, value).flatten(1, 2)
    added = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for given, causal in ((mask, False), (added, False), (None, True)):
        found = Scores(0.7, softcap).attend(query, key, value, given, 0.0, causal)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", ["gpt2", *FAMILIES])
def test_gradients_equal_those_of_each_document_alone(family):
    torch.manual_seed(3)
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **FAMILIES.get(family, {}))
    model = GPT(config, vocab_size=50, padded_vocab_size=64, max_positions=TOKENS, dtype=torch.float64).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(50, (BATCH, TOKENS), generator=generator) for _ in range(2))
    numbers = documents(generator)
    starts = [(numbers[row] == numbers[row, place]).nonzero()[0, 0] for row in range(BATCH) for place in range(TOKENS)]
    positions = torch.arange(TOKENS) - torch.stack(starts).view(BATCH, TOKENS)
    together = model(tokens, labels, positions_BT=positions, documents_BT=numbers).sum()
    together.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for row in range(BATCH):
        for number in numbers[row].unique():
            chosen = numbers[row] == number
            alone += model(tokens[row, chosen][None], labels[row, chosen][None]).sum()
    alone.backward()
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


def saved_bytes(tokens, options):
    """Bytes of all storages that one layer keeps for its backward pass over one document."""
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **options)
    model = GPT(config, vocab_size=50, padded_vocab_size=64, max_positions=tokens)
    numbers = torch.zeros(1, tokens, dtype=torch.int64)
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(torch.zeros(1, tokens, dtype=torch.int64), documents_BT=numbers)
    return sum(storages.values())


@pytest.mark.parametrize("options", [{}, {"window_size": (256, 0)}, {"attn_logit_softcapping": 50.0}])
def test_memory_of_a_layer_is_linear_in_the_number_of_tokens(options):
    small, large = saved_bytes(2048, options), saved_bytes(8192, options)
    assert large < 4.5 * small
    if "window_size" not in options:  # with a window each block of queries keeps its mask and weights
        assert large < 8192 * 8192 // 2
