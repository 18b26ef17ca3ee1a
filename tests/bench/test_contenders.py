"""The model of Hugging Face that the benches measure is the class of the same function, whatever the family."""

from dataclasses import replace

import pytest
import torch

from holdfast.bench.contenders import hugging_face_model
from holdfast.config import read_config
from holdfast.models.bert import BERT
from holdfast.models.gpt import GPT
from holdfast.parallel.layout import padded_vocab_size

FAMILIES = {
    "mistral_7b": "MistralForCausalLM",
    "qwen3_0.6b": "Qwen3ForCausalLM",
    "pythia_160m": "GPTNeoXForCausalLM",
    "bert_base": "MegatronBertForPreTraining",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_faces_model_is_the_class_of_the_same_function(name):
    config = read_config(name)
    model = replace(config.model, vocab_size=config.model.vocab_size or 1000)
    padded = padded_vocab_size(model.vocab_size, model, 1)
    positions = model.max_position_embeddings or config.data.seq_length
    with torch.device("meta"):
        theirs = hugging_face_model(replace(config, model=model))
        kind = BERT if model.model_type == "bert" else GPT
        ours = kind(model, vocab_size=padded, padded_vocab_size=padded, max_positions=positions)
    assert type(theirs).__name__ == FAMILIES[name]
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
