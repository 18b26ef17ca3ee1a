"""z-loss against autograd of the plain formula in float64: alone, in chunks, by the compiled functions, and over shards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from holdfast.config import ModelConfig
from holdfast.models.gpt import GPT
from holdfast.models.loss import VocabShard, vocabulary_loss
from holdfast.parallel.tensor import build_vocab_shard
from tests.gloo import spawn_ranks

TOKENS, WIDTH, VOCABULARY, PADDED = 40, 16, 101, 128
COEFFICIENT = 0.03


def inputs(bias: bool) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = [(TOKENS, WIDTH), (PADDED, WIDTH), (PADDED,)][: 3 if bias else 2]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights = torch.rand(TOKENS, generator=generator).round(decimals=1).double()
    weights[::7] = 0
    return leaves, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator), weights


def plain(leaves: list[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor, z_loss: float) -> list[torch.Tensor]:
    """[loss, z-loss, gradients] by autograd, of all logits at once."""
    logits = torch.nn.functional.linear(*leaves)[:, :VOCABULARY]
    log_z = logits.logsumexp(1)
    z = (z_loss * log_z**2 * weights).sum()
    loss = ((log_z - logits.gather(1, labels[:, None])[:, 0]) * weights).sum() + z
    return [loss, z, *torch.autograd.grad(loss * 0.5, leaves)]


@pytest.mark.parametrize("compiled", [False, True])
def test_no_tokens_have_no_loss(compiled):
    x, matrix = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(PADDED, WIDTH, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    total, _, _ = vocabulary_loss(x, matrix, empty, empty.float(), VOCABULARY, shard=VocabShard(compiled=compiled))
    total.backward()
    assert total == 0 and not matrix.grad.any()


def test_a_second_derivative_is_refused():
    leaves, labels, weights = inputs(bias=False)
    total, _, _ = vocabulary_loss(*leaves, labels, weights, VOCABULARY)
    (dx,) = torch.autograd.grad(total * leaves[0].sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("z_loss", [0.0, COEFFICIENT])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(monkeypatch, z_loss, bias, compiled):
    monkeypatch.setattr("holdfast.models.loss.CHUNK_ELEMENTS", 7 * PADDED)
    monkeypatch.setattr("holdfast.models.loss.COMPILED_CHUNK_ELEMENTS", 10 * PADDED)
    leaves, labels, weights = inputs(bias)
    with torch.compiler.set_stance("force_eager"):
        total, _, z = vocabulary_loss(
            leaves[0],
            leaves[1],
            labels,
            weights,
            VOCABULARY,
            leaves[2] if bias else None,
            VocabShard(compiled=compiled),
            z_loss,
        )
    assert not z.requires_grad
    found = [total, z, *torch.autograd.grad(total * 0.5, leaves)]
    for ours, theirs in zip(found, plain(leaves, labels, weights, z_loss), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert (float(z) > 1) == bool(z_loss)


def losses_of_a_shard() -> list[list[np.ndarray]]:
    """[loss, z-loss, gradients] on this rank, by single operations and by the functions that are compiled."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    (x, matrix), labels, weights = inputs(bias=False)
    carrier = torch.nn.Module()
    carrier.output_layer = torch.nn.Linear(WIDTH, PADDED, bias=False)
    shard = build_vocab_shard(carrier, mesh, Replicate())
    own = matrix.detach().chunk(2)[dist.get_rank()].requires_grad_()
    results = []
    for compiled in (False, True):
        with torch.compiler.set_stance("force_eager"):
            total, _, z = vocabulary_loss(
                shard.gather_hidden(x),
                own,
                labels,
                weights,
                VOCABULARY,
                None,
                replace(shard, compiled=compiled),
                COEFFICIENT,
            )
        found = (total, z, *torch.autograd.grad(total * 0.5, [x, own]))
        results.append([tensor.detach().numpy() for tensor in found])
    dist.destroy_process_group()
    return results


@pytest.mark.slow
@pytest.mark.distributed
def test_shards_of_the_vocabulary_give_the_loss_and_gradients_of_the_whole():
    loss, z, dx, dmatrix = (tensor.detach().numpy() for tensor in plain(*inputs(bias=False), COEFFICIENT))
    for rank, results in enumerate(spawn_ranks(2, losses_of_a_shard)):
        for found in results:
            for ours, theirs in zip(found, [loss, z, dx, np.split(dmatrix, 2)[rank]], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_model_gives_cross_entropy_and_z_loss_apart_and_the_gradient_of_their_sum():
    torch.manual_seed(2)
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=PADDED, max_positions=8, dtype=torch.float64).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 3, 8))
    parameters = list(model.parameters())
    logits = model.logits(model.hidden(tokens))
    z = COEFFICIENT * logits.logsumexp(-1).square().sum()
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected = torch.autograd.grad(entropy + z, parameters)
    assert model(tokens, labels).shape == (1,)
    model.z_loss = COEFFICIENT
    found = model(tokens, labels)
    torch.testing.assert_close(found, torch.stack((entropy, z)), rtol=1e-12, atol=0)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chunks_of_a_narrow_matrix_gradient_are_added_up_in_fp32(monkeypatch):
    """As under FSDP2, where the output matrix is gathered in bf16."""
    monkeypatch.setattr("holdfast.models.loss.CHUNK_ELEMENTS", PADDED)  # one token each
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, WIDTH, generator=generator).bfloat16()
    matrix = torch.randn(PADDED, WIDTH, generator=generator).bfloat16().requires_grad_()
    labels, weights = torch.zeros(400, dtype=torch.int64), torch.ones(400)  # one row gets a part of every chunk
    vocabulary_loss(x, matrix, labels, weights, VOCABULARY)[0].backward()
    wide = matrix.detach().double().requires_grad_()
    vocabulary_loss(x.double(), wide, labels, weights.double(), VOCABULARY)[0].backward()
    assert matrix.grad.dtype == torch.bfloat16
    assert (matrix.grad.double() - wide.grad).norm() < 0.005 * wide.grad.norm()
