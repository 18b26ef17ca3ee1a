"""Small Holdfast runs on disk: a model with random weights, saved the way the trainer saves it."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from holdfast.checkpoint import State, save
from holdfast.config import Config, ModelConfig, config_to_toml
from holdfast.models.gpt import GPT

VOCABULARY, PADDED, POSITIONS = 300, 384, 32

GPT2_TINY = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, openai_gelu=True)
LLAMA_TINY = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, swiglu=True,
    normalization="RMSNorm", norm_epsilon=1e-6, position_embedding_type="rope", rotary_base=50000.0,
    disable_bias_linear=True, untie_embeddings_and_output_weights=True, max_position_embeddings=POSITIONS,
)  # fmt: skip


def build_gpt(model: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(1)
    gpt = GPT(model, vocab_size=VOCABULARY, padded_vocab_size=PADDED, max_positions=POSITIONS, dtype=dtype)
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return gpt.to(dtype).eval()


def write_run(folder: Path, model: ModelConfig, gpt: torch.nn.Module, optimizer=None, step: int = 7, **data) -> Path:
    config = Config()
    config = replace(config, model=model, data=replace(config.data, seq_length=POSITIONS, **data))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_to_toml(config))
    tables = {section: dict(table) for section, table in asdict(config).items()}
    shared = {"iteration": step, "config": tables, "true_vocab_size": VOCABULARY}
    rows = {"embedding.word_embeddings.weight": VOCABULARY}
    if model.untie_embeddings_and_output_weights:
        rows["output_layer.weight"] = VOCABULARY
    save(folder / "checkpoints", step, State(gpt, optimizer or (), shared=shared, padded_rows=rows))
    return folder
