"""GPT against `transformers`: the same weights give the same logits, losses and gradients, in fp64."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from holdfast.config import ModelConfig
from holdfast.models.gpt import GPT
from holdfast.models.initial import initial_value
from holdfast.models.loss import VocabShard, vocabulary_loss

VOCABULARY, PADDED, POSITIONS = 101, 128, 24


def build(config: ModelConfig) -> GPT:
    model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=PADDED, max_positions=POSITIONS, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, config, seed=7, vocab_size=VOCABULARY)
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
        parameter.data = (value + noise).double()
    return model.double()


def gpt2_pair(activation: str) -> tuple[GPT, torch.nn.Module, dict[str, torch.Tensor]]:
    config = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, openai_gelu=activation == "gelu_new")
    ours = build(config)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=32, n_layer=3, n_head=4, activation_function=activation,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    ).double()  # fmt: skip
    return ours, theirs, map_gpt2(ours, theirs)


def map_gpt2(ours, theirs):
    """Copies our weights into theirs; returns a view of their parameters' gradients under our names."""
    own = dict(ours.named_parameters())
    gradients = {}

    def give(name, target, convert=lambda x: x, back=lambda x: x):
        target.data.copy_(convert(own[name].data))
        gradients[name] = lambda: back(target.grad)

    def thirds(x):  # [heads, 3, d] → [3, heads, d], and Conv1D stores the transpose
        y = x.reshape(4, 3, 8, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        return y.T if x.ndim == 2 else y

    def unthirds(x):
        x = x.T if x.ndim == 2 else x
        return x.reshape(3, 4, 8, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    body = theirs.transformer
    body.wte.weight.data.copy_(own["embedding.word_embeddings.weight"].data[:VOCABULARY])
    gradients["embedding.word_embeddings.weight"] = lambda: body.wte.weight.grad
    give("embedding.position_embeddings.weight", body.wpe.weight)
    for number, block in enumerate(body.h):
        prefix = f"decoder.layers.{number}."
        for kind in ("weight", "bias"):
            give(f"{prefix}input_layernorm.{kind}", getattr(block.ln_1, kind))
            give(f"{prefix}pre_mlp_layernorm.{kind}", getattr(block.ln_2, kind))
            give(f"{prefix}self_attention.linear_qkv.{kind}", getattr(block.attn.c_attn, kind), thirds, unthirds)
            for name, target in (
                ("self_attention.linear_proj", block.attn.c_proj),
                ("mlp.linear_fc1", block.mlp.c_fc),
                ("mlp.linear_fc2", block.mlp.c_proj),
            ):
                give(f"{prefix}{name}.{kind}", getattr(target, kind), lambda x: x.t(), lambda x: x.t())
    give("decoder.final_layernorm.weight", body.ln_f.weight)
    give("decoder.final_layernorm.bias", body.ln_f.bias)
    return gradients


class WideRotary(torch.nn.Module):
    """What LlamaRotaryEmbedding computes, without its detour through fp32."""

    def forward(self, x, position_ids):
        frequencies = 500.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()


def widen(llama):
    """LlamaRMSNorm and the rotary table cast to fp32; torch's own norm and a fp64 table make the oracle fp64 throughout."""
    llama.model.rotary_emb = WideRotary()
    for parent in [llama.model, *llama.model.layers]:
        for name, child in list(parent.named_children()):
            if "RMSNorm" in type(child).__name__:
                norm = torch.nn.RMSNorm(32, eps=1e-5, dtype=torch.float64)
                setattr(parent, name, norm)


def llama_pair():
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, swiglu=True,
        position_embedding_type="rope", normalization="RMSNorm", disable_bias_linear=True, rotary_base=500.0,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    ours = build(config)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=POSITIONS, rms_norm_eps=1e-5, rope_theta=500.0,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False,
        )
    ).double()  # fmt: skip
    widen(theirs)
    own = dict(ours.named_parameters())
    gradients = {}

    def give(name, target, rows=slice(None)):
        target.data.copy_(own[name].data[rows])
        gradients[name] = lambda: target.grad

    give("embedding.word_embeddings.weight", theirs.model.embed_tokens.weight, slice(VOCABULARY))
    give("output_layer.weight", theirs.lm_head.weight, slice(VOCABULARY))
    give("decoder.final_layernorm.weight", theirs.model.norm.weight)
    for number, block in enumerate(theirs.model.layers):
        prefix = f"decoder.layers.{number}."
        give(f"{prefix}input_layernorm.weight", block.input_layernorm.weight)
        give(f"{prefix}pre_mlp_layernorm.weight", block.post_attention_layernorm.weight)
        give(f"{prefix}self_attention.linear_proj.weight", block.self_attn.o_proj.weight)
        give(f"{prefix}mlp.linear_fc1_gate.weight", block.mlp.gate_proj.weight)
        give(f"{prefix}mlp.linear_fc1_up.weight", block.mlp.up_proj.weight)
        give(f"{prefix}mlp.linear_fc2.weight", block.mlp.down_proj.weight)
        name = f"{prefix}self_attention.linear_qkv.weight"
        groups = own[name].data.view(2, 4, 8, 32)  # two groups of two queries, a key and a value
        block.self_attn.q_proj.weight.data.copy_(groups[:, :2].reshape(32, 32))
        block.self_attn.k_proj.weight.data.copy_(groups[:, 2].reshape(16, 32))
        block.self_attn.v_proj.weight.data.copy_(groups[:, 3].reshape(16, 32))

        def joined(attention=block.self_attn):
            q = attention.q_proj.weight.grad.view(2, 2, 8, 32)
            k = attention.k_proj.weight.grad.view(2, 1, 8, 32)
            v = attention.v_proj.weight.grad.view(2, 1, 8, 32)
            return torch.cat((q, k, v), dim=1).reshape(64, 32)

        gradients[name] = joined
    return ours, theirs, gradients


PAIRS = {"gpt2-tanh": lambda: gpt2_pair("gelu_new"), "gpt2-erf": lambda: gpt2_pair("gelu"), "llama": llama_pair}


@pytest.mark.parametrize("family", PAIRS)
def test_logits_and_gradients_equal_those_of_transformers(family):
    ours, theirs, gradients = PAIRS[family]()
    tokens = torch.randint(0, VOCABULARY, (2, POSITIONS + 1), generator=torch.Generator().manual_seed(1))
    theirs_out = theirs(tokens[:, :-1]).logits
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours.hidden(tokens[:, :-1])), theirs_out, rtol=0, atol=1e-12)

    loss = torch.nn.functional.cross_entropy(theirs_out.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    total = ours(tokens[:, :-1], tokens[:, 1:])
    (total.sum() / tokens[:, 1:].numel()).backward()
    torch.testing.assert_close(total.sum() / tokens[:, 1:].numel(), loss, rtol=1e-12, atol=0)
    assert set(gradients) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected = gradients[name]()
        torch.testing.assert_close(parameter.grad[: expected.shape[0]], expected, rtol=1e-10, atol=1e-12, msg=name)


def test_padded_tokens_are_never_predicted_and_get_no_gradient():
    ours, _, _ = gpt2_pair("gelu")
    ours.embedding.word_embeddings.weight.data[VOCABULARY:] = 100.0  # padding that would win every prediction
    tokens = torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(2))
    total = ours(tokens[:, :-1], tokens[:, 1:])
    total.sum().backward()
    assert torch.isfinite(total).all() and float(total.detach()) / 8 < 20
    assert not ours.embedding.word_embeddings.weight.grad[VOCABULARY:].any()


def test_attention_does_not_cross_documents_on_request():
    ours, _, _ = gpt2_pair("gelu")
    tokens = torch.randint(0, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        together = ours.hidden(tokens, positions, documents)
        alone = ours.hidden(tokens[:, 5:])
    torch.testing.assert_close(together[:, 5:], alone, rtol=0, atol=1e-12)


def test_the_loss_in_chunks_equals_the_loss_at_once(monkeypatch):
    ours, _, _ = gpt2_pair("gelu")
    tokens = torch.randint(0, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(4))
    mask = (torch.rand(2, 20, generator=torch.Generator().manual_seed(5)) > 0.3).float()
    results = []
    for elements in (1 << 25, 3 * PADDED):
        monkeypatch.setattr("holdfast.models.loss.CHUNK_ELEMENTS", elements)
        ours.zero_grad()
        total = ours(tokens[:, :-1], tokens[:, 1:], mask)
        total.sum().backward()
        results.append((total.detach(), ours.embedding.word_embeddings.weight.grad.clone()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-13, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_by_compiled_kernels_equals_the_loss_by_single_operations(monkeypatch, dtype):
    monkeypatch.setattr("holdfast.models.loss.COMPILED_CHUNK_ELEMENTS", 10 * PADDED)
    generator = torch.Generator().manual_seed(6)
    x, matrix = torch.randn(40, 16, generator=generator), torch.randn(PADDED, 16, generator=generator)
    labels = torch.randint(0, VOCABULARY, (40,), generator=generator)
    weights, bias = torch.rand(40, generator=generator).round(decimals=1), torch.randn(PADDED, generator=generator)
    results = []
    for compiled in (False, True):
        leaves = [t.clone().to(dtype).requires_grad_() for t in (x, matrix, bias)]
        # the same functions, run by torch without compiling them: a compiler is not what is tested here
        with torch.compiler.set_stance("force_eager"):
            total, right, _ = vocabulary_loss(
                leaves[0], leaves[1], labels, weights, VOCABULARY, leaves[2], VocabShard(compiled=compiled)
            )
        (total * 0.5).backward()
        results.append((total.detach(), right, *(leaf.grad for leaf in leaves)))
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    logits = torch.nn.functional.linear(x.double(), matrix.double(), bias.double())[:, :VOCABULARY]
    expected = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    assert float(results[1][0]) == pytest.approx(float(expected), rel=1e-6 if dtype == torch.float64 else 0.02)


def test_a_starting_weight_depends_on_seed_and_name_alone():
    config = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    name, shape = "embedding.word_embeddings.weight", torch.Size((256, 8))
    wide = initial_value(name, shape, config, seed=1, vocab_size=100)
    narrow = initial_value(name, torch.Size((128, 8)), config, seed=1, vocab_size=100)
    assert torch.equal(wide[:100], narrow[:100]) and not wide[100:].any()
    assert not torch.equal(wide, initial_value(name, shape, config, seed=2, vocab_size=100))
