"""Transformers as oracle in double precision: what it casts to fp32 on the way is done in fp64 here, with its own settings."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForPreTraining


class WideRotary(torch.nn.Module):
    """What LlamaRotaryEmbedding computes, without its detour through fp32."""

    def __init__(self, config):
        super().__init__()
        self.base, self.head = config.rope_parameters["rope_theta"], config.head_dim

    def forward(self, x, position_ids):
        frequencies = self.base ** (-torch.arange(0, self.head, 2, dtype=torch.float64) / self.head)
        angles = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()


def load_wide(folder, kind=AutoModelForCausalLM):
    """The model of a Hugging Face folder, in fp64 throughout."""
    model = kind.from_pretrained(folder, dtype=torch.float64).eval()
    if model.config.model_type == "llama":
        model.model.rotary_emb = WideRotary(model.config)
        for parent in [model.model, *model.model.layers]:
            for name, child in list(parent.named_children()):
                if "RMSNorm" in type(child).__name__:
                    norm = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                    norm.weight = child.weight
                    setattr(parent, name, norm)
    return model


def load_wide_bert(folder):
    return load_wide(folder, AutoModelForPreTraining)
