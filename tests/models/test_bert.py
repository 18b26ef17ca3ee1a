"""BERT against `transformers`: the same weights give the same logits, losses and gradients, in fp64, padding included."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForPreTraining, MegatronBertConfig, MegatronBertForPreTraining

from holdfast.config import ModelConfig
from holdfast.models.bert import BERT
from holdfast.models.initial import initial_value

VOCABULARY, PADDED, POSITIONS, HEADS, WIDTH = 101, 128, 24, 4, 8
TINY = ModelConfig(model_type="bert", num_layers=3, hidden_size=32, num_attention_heads=HEADS, norm_epsilon=1e-12)
VARIANTS = {
    "megatron": (replace(TINY, bert_variant="megatron"), MegatronBertConfig, MegatronBertForPreTraining),
    "original": (replace(TINY, bert_variant="original"), BertConfig, BertForPreTraining),
    "original-tanh": (replace(TINY, bert_variant="original", openai_gelu=True), BertConfig, BertForPreTraining),
}


def build(config: ModelConfig, **stage: object) -> BERT:
    sizes = dict(vocab_size=VOCABULARY, padded_vocab_size=PADDED, max_positions=POSITIONS)
    model = BERT(config, **sizes, dtype=torch.float64, **stage)
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, config, seed=7, vocab_size=VOCABULARY)
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
        parameter.data = (value + noise).double()
    return model.double()


def oracle(variant: str) -> torch.nn.Module:
    config, kind, model = VARIANTS[variant]
    return model(
        kind(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=HEADS, intermediate_size=128,
            max_position_embeddings=POSITIONS, layer_norm_eps=1e-12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            hidden_act="gelu_new" if config.openai_gelu else "gelu",
        )
    ).double()  # fmt: skip


def pair_parameters(ours: BERT, theirs: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Our name → their parameters that hold the same numbers; our qkv is their query, key and value."""
    bert, heads = theirs.bert, theirs.cls
    table = {
        "embedding.word_embeddings.weight": [bert.embeddings.word_embeddings.weight],
        "embedding.position_embeddings.weight": [bert.embeddings.position_embeddings.weight],
        "embedding.tokentype_embeddings.weight": [bert.embeddings.token_type_embeddings.weight],
        "output_layer.bias": [heads.predictions.bias],
    }

    def give(name, *modules):
        for kind in ("weight", "bias"):
            table[f"{name}.{kind}"] = [getattr(module, kind) for module in modules]

    give("pooler.dense", bert.pooler.dense)
    give("binary_head", heads.seq_relationship)
    give("lm_head.dense", heads.predictions.transform.dense)
    give("lm_head.layer_norm", heads.predictions.transform.LayerNorm)
    original = ours.config.bert_variant == "original"
    if original:
        give("embedding.layernorm", bert.embeddings.LayerNorm)
    else:
        give("encoder.final_layernorm", bert.encoder.ln)
    for number, layer in enumerate(bert.encoder.layer):
        prefix, attention = f"encoder.layers.{number}.", layer.attention
        give(prefix + "self_attention.linear_qkv", attention.self.query, attention.self.key, attention.self.value)
        give(prefix + "self_attention.linear_proj", attention.output.dense)
        give(prefix + "mlp.linear_fc1", layer.intermediate.dense)
        give(prefix + "mlp.linear_fc2", layer.output.dense)
        first, second = (attention.output.LayerNorm, layer.output.LayerNorm) if original else (attention.ln, layer.ln)
        give(prefix + ("post_attention_layernorm" if original else "input_layernorm"), first)
        give(prefix + ("post_mlp_layernorm" if original else "pre_mlp_layernorm"), second)
    return table


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Query, key and value, [heads, width] each, as [heads, 3, width] rows."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.reshape(HEADS, WIDTH, -1) for part in parts], dim=1).reshape(-1, *parts[0].shape[1:])


def sample_batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    lengths = torch.tensor([POSITIONS, 17, 9])
    padding = torch.arange(POSITIONS)[None] < lengths[:, None]
    tokens = torch.randint(1, VOCABULARY, (3, POSITIONS), generator=random) * padding
    types = ((torch.arange(POSITIONS)[None] > lengths[:, None] // 2) & padding).long()
    labels = torch.randint(0, VOCABULARY, (3, POSITIONS), generator=random)
    chosen = (torch.rand(3, POSITIONS, generator=random) < 0.3) & padding
    return dict(
        tokens=tokens, padding=padding, types=types, labels=labels, chosen=chosen, pairs=torch.tensor([0, 1, 1])
    )


def loss_arguments(batch: dict[str, torch.Tensor], most: int = 12) -> dict[str, torch.Tensor]:
    assert batch["chosen"].sum(1).max() < most  # some places are left over, with weight 0
    order = batch["chosen"].float().sort(dim=1, descending=True, stable=True)
    places = order.indices[:, :most]
    return dict(
        places_BP=places,
        labels_BP=batch["labels"].gather(1, places),
        weights_BP=order.values[:, :most],
        is_random_B=batch["pairs"],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_losses_and_gradients_equal_those_of_transformers(variant):
    ours, theirs, batch = build(VARIANTS[variant][0]), oracle(variant), sample_batch()
    table = pair_parameters(ours, theirs)
    own = dict(ours.named_parameters())
    assert table.keys() == own.keys()
    for name, parts in table.items():
        parameter = own[name].data
        split = parameter.reshape(HEADS, 3, WIDTH, -1).unbind(1) if len(parts) == 3 else (parameter[: len(parts[0])],)
        for part, value in zip(parts, split, strict=True):
            part.data.copy_(value.reshape(part.shape))

    out = theirs(batch["tokens"], attention_mask=batch["padding"].long(), token_type_ids=batch["types"])
    with torch.no_grad():
        logits, scores = ours.logits(ours.hidden(batch["tokens"], batch["padding"], batch["types"]))
    torch.testing.assert_close(logits[batch["padding"]], out.prediction_logits[batch["padding"]], rtol=0, atol=1e-12)
    torch.testing.assert_close(scores, out.seq_relationship_logits, rtol=0, atol=1e-12)

    chosen = batch["chosen"]
    masked = F.cross_entropy(out.prediction_logits[chosen], batch["labels"][chosen], reduction="sum")
    paired = F.cross_entropy(out.seq_relationship_logits, batch["pairs"], reduction="sum")
    (masked / chosen.sum() + paired / 3).backward()
    sums = ours(batch["tokens"], batch["padding"], batch["types"], **loss_arguments(batch))
    (sums[0] / chosen.sum() + sums[2] / 3).backward()
    hits = (out.prediction_logits[chosen].argmax(-1) == batch["labels"][chosen]).sum()
    pair_hits = (out.seq_relationship_logits.argmax(-1) == batch["pairs"]).sum()
    torch.testing.assert_close(sums, torch.stack((masked, hits, paired, pair_hits)).double(), rtol=1e-12, atol=0)
    for name, parts in table.items():
        expected = joined([part.grad for part in parts])
        torch.testing.assert_close(own[name].grad[: len(expected)], expected, rtol=1e-9, atol=1e-12, msg=name)
        assert not own[name].grad[len(expected) :].any()


def test_padding_changes_nothing_about_the_tokens_before_it():
    ours, batch = build(TINY), sample_batch()
    with torch.no_grad():
        together = ours.hidden(batch["tokens"], batch["padding"], batch["types"])[1, :17]
        alone = ours.hidden(batch["tokens"][1:2, :17], None, batch["types"][1:2, :17])[0]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["megatron", "original"])
def test_two_stages_are_the_whole_model(variant):
    config, batch = VARIANTS[variant][0], sample_batch()
    whole = build(config)
    first, last = build(config, layers=[0, 1], is_last=False), build(config, layers=[2], is_first=False)
    names = {name for stage in (first, last) for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}
    everywhere = (batch["padding"], batch["types"])
    with torch.no_grad():
        expected = whole(batch["tokens"], *everywhere, **loss_arguments(batch))
        found = last(first(batch["tokens"], *everywhere), *everywhere, **loss_arguments(batch))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_without_the_binary_head_there_are_neither_its_weights_nor_its_terms():
    model, batch = build(replace(TINY, bert_no_binary_head=True)), sample_batch()
    assert not any(name.startswith(("pooler", "binary")) for name, _ in model.named_parameters())
    arguments = loss_arguments(batch)
    del arguments["is_random_B"]
    sums = model(batch["tokens"], batch["padding"], batch["types"], **arguments)
    assert sums.shape == (2,) and sums[0] > 0


@pytest.mark.parametrize("variant", ["megatron", "original"])
def test_layers_compile_without_a_graph_break(variant):
    config, batch = VARIANTS[variant][0], sample_batch()
    model = build(config)
    expected = model.hidden(batch["tokens"], batch["padding"], batch["types"])
    torch._dynamo.reset()
    for layer in model.encoder.layers.values():
        layer.compile(fullgraph=True, dynamic=False, backend="eager")
    found = model.hidden(batch["tokens"], batch["padding"], batch["types"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
