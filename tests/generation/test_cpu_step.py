"""The direct step on the CPU against the model's own layers, for every option that it knows."""

from dataclasses import replace

import pytest
import torch

from holdfast.generation.cache import SlotCache
from holdfast.generation.cpu_step import CPUStep, can_step_directly
from holdfast.generation.loading import arrange_for_vectors
from holdfast.generation.model_step import PlainStep, choose_step, read_prompts
from tests.conversion.holdfast_runs import GPT2_TINY, LLAMA_TINY, POSITIONS, VOCABULARY, build_gpt

LLAMA3 = {"rope_scaling_type": "llama3", "rope_scaling_factor": 8.0, "original_max_position_embeddings": 8}
CONFIGS = {
    "gpt2": GPT2_TINY,
    "exact gelu, untied": replace(GPT2_TINY, openai_gelu=False, untie_embeddings_and_output_weights=True),
    "llama": LLAMA_TINY,
    "llama 3": replace(LLAMA_TINY, use_rope_scaling=True, **LLAMA3),
    "window": replace(LLAMA_TINY, window_size=(5, 0)),
    "part of the head rotated": replace(LLAMA_TINY, rotary_percent=0.5),
    "bias of qkv": replace(LLAMA_TINY, add_qkv_bias=True, num_query_groups=4),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_direct_step_equals_the_layers_of_the_model(name):
    model = build_gpt(CONFIGS[name])
    wanted = {name: parameter.clone() for name, parameter in model.named_parameters()}
    arranged = arrange_for_vectors(build_gpt(CONFIGS[name]))
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in arranged.named_parameters())
    assert isinstance(choose_step(arranged), CPUStep)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]]
    found = []
    for one, step in ((model, PlainStep(model)), (arranged, CPUStep(arranged))):
        cache = SlotCache(one.config, 4, POSITIONS, torch.float32, torch.device("cpu"))
        read_prompts(one, prompts, [[0], [1], [2]], cache)
        tokens, positions = torch.tensor([3, 4, 5, 0]), torch.tensor([3, 1, 8, 0])
        logits = []
        for _ in range(6):
            logits.append(step(tokens, positions, cache, 64))
            tokens, positions = logits[-1].argmax(-1), positions + 1
        found.append(torch.stack(logits))
    assert found[0].shape == (6, 4, VOCABULARY)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_options_that_it_does_not_know_take_the_plain_step():
    for other in ({"qk_layernorm": True}, {"use_parallel_residual": True}):
        model = build_gpt(replace(LLAMA_TINY, **other))
        assert not can_step_directly(model) and isinstance(choose_step(model), PlainStep)
