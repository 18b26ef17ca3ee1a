"""The fused step on the card: within the error of plain bf16 after every layer, in a graph, and through the engine."""

from dataclasses import replace

import pytest
import torch

from holdfast.config import ModelConfig
from holdfast.generation.cache import SlotCache
from holdfast.generation.model_step import PlainStep, choose_step
from holdfast.models.gpt import GPT

pytestmark = [pytest.mark.gpu]

GPT2 = ModelConfig(num_layers=3, hidden_size=1024, num_attention_heads=16, openai_gelu=True)
LLAMA = ModelConfig(
    num_layers=3, hidden_size=2048, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=8192, swiglu=True,
    normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True,
)  # fmt: skip
WIDE_HEADS = replace(LLAMA, hidden_size=1280, num_attention_heads=10, num_query_groups=2, ffn_hidden_size=3456)
NARROW_HEADS = replace(GPT2, hidden_size=1280, num_attention_heads=16)  # heads of 80


def build(config: ModelConfig) -> GPT:
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = GPT(config, vocab_size=50257, padded_vocab_size=50304, max_positions=1024, dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.03) if parameter.ndim == 2 else parameter.data.add_(0.1)
    return model.to(torch.bfloat16).eval()


@torch.no_grad()
def errors(model: GPT, rows: int, dependent_launch: bool) -> tuple[float, float]:
    """Relative errors of the fused step's and of the plain step's logits against the plain model in fp32."""
    from holdfast.generation.fused_step import FusedStep

    tokens = torch.randint(0, 50257, (rows, 301), device="cuda")
    positions = torch.tensor([300 - 37 * row % 300 for row in range(rows)], device="cuda")
    newest = tokens[torch.arange(rows, device="cuda"), positions]
    caches = [SlotCache(model.config, rows, 512, torch.bfloat16, torch.device("cuda")) for _ in range(2)]
    for cache in caches:
        model.hidden(tokens, caches=cache.reading([[row] for row in range(rows)]))
    fused = FusedStep(model, dependent_launch=dependent_launch)(newest, positions, caches[0], 512).float()
    plain = PlainStep(model)(newest, positions, caches[1], 512).float()
    exact = SlotCache(model.config, rows, 512, torch.float32, torch.device("cuda"))
    exact.keys_NBGSD.copy_(caches[1].keys_NBGSD)
    exact.values_NBGSD.copy_(caches[1].values_NBGSD)
    model.float().dtype = torch.float32
    wanted = PlainStep(model)(newest, positions, exact, 512)
    model.to(torch.bfloat16).dtype = torch.bfloat16
    return tuple(((found - wanted).norm() / wanted.norm()).item() for found in (fused, plain))  # type: ignore[return-value]


MODELS = {"gpt2": GPT2, "llama": LLAMA, "wide": WIDE_HEADS, "narrow": NARROW_HEADS}


@pytest.mark.parametrize(
    ("model", "rows", "dependent_launch"),
    [
        ("gpt2", 1, True),
        ("gpt2", 1, False),
        ("gpt2", 8, True),
        ("gpt2", 64, True),
        ("llama", 1, True),
        ("llama", 8, True),
        ("llama", 40, False),
        ("wide", 1, True),
        ("wide", 3, True),
        ("narrow", 1, True),
        ("narrow", 20, True),
    ],
)
def test_the_fused_step_rounds_no_more_than_the_plain_one(model, rows, dependent_launch):
    """After every layer: models of one, two and three layers."""
    if dependent_launch and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the device has no programmatic dependent launch")
    for layers in (1, 2, 3):
        fused, plain = errors(build(replace(MODELS[model], num_layers=layers)), rows, dependent_launch)
        assert fused <= 1.2 * plain


def test_the_likeliest_token_is_found_in_every_row():
    from holdfast.generation.sampling import largest

    logits = torch.randn(5, 50304, device="cuda")[:, :50257].round(decimals=3)  # with equal values
    found = largest(logits)
    assert torch.equal(logits.gather(1, found[:, None])[:, 0], logits.amax(1))


def test_a_recorded_pass_over_prompts_reads_as_the_model_does():
    from holdfast.generation.model_step import read_prompts
    from holdfast.generation.prompt_reading import PromptReader

    model = build(GPT2)
    caches = [SlotCache(model.config, 4, 256, torch.bfloat16, torch.device("cuda")) for _ in range(2)]
    reader = PromptReader(model, caches[0], 256)
    with torch.inference_mode():
        for prompts in ([(1, 2, 3), (4,)], [(5,), (6, 7)], [(8, 9), (10, 11, 12)]):
            found = reader(prompts, [[2], [0]]).float()
            wanted = read_prompts(model, prompts, [[2], [0]], caches[1]).float()
            assert (found - wanted).norm() <= 0.02 * wanted.norm()
            for row, prompt in zip((2, 0), prompts, strict=True):
                one, other = (cache.keys_NBGSD[:, row, :, : len(prompt)].float() for cache in caches)
                assert (one - other).norm() <= 0.02 * other.norm()


@torch.no_grad()
def test_a_recorded_step_repeats_bit_for_bit():
    model = build(replace(GPT2, num_layers=24))
    step = choose_step(model)
    assert type(step).__name__ == "FusedStep"
    tokens, positions = torch.tensor([7], device="cuda"), torch.tensor([0], device="cuda")
    cache = SlotCache(model.config, 1, 512, torch.bfloat16, torch.device("cuda"))

    def advance() -> None:
        tokens.copy_(step(tokens, positions, cache, 512).argmax(-1))
        positions.add_(1)

    advance()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    found = []
    for _ in range(3):
        tokens.fill_(7)
        positions.zero_()
        texts = []
        for _ in range(200):
            graph.replay()
            texts.append(tokens.clone())
        found.append(torch.cat(texts).tolist())
    assert found[0] == found[1] == found[2]
