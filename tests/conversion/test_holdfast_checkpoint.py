"""Holdfast's own runs to Hugging Face and back: the same function, the same bits, a tokenizer that works."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import convert
from holdfast.checkpoint import open_checkpoint
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import build_tokenizer
from tests.conversion.holdfast_runs import GPT2_TINY, LLAMA_TINY, POSITIONS, VOCABULARY, build_gpt, write_run
from tests.conversion.oracles import load_wide


def byte_level_tokenizer(folder: Path, size: int = VOCABULARY) -> tuple[str, str]:
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    trainer = ByteLevelBPETokenizer()
    text = [
        "the quick brown fox jumps over the lazy dog and the other dogs " * 3,
        "return self.value if self else None",
    ]
    trainer.train_from_iterator(text * 4, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
    trainer.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    while len(vocab) < size:
        vocab[f"filler{len(vocab)}"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@pytest.mark.parametrize(
    "model",
    [
        GPT2_TINY,
        replace(GPT2_TINY, openai_gelu=False, norm_epsilon=1e-4, ffn_hidden_size=80),
        replace(GPT2_TINY, untie_embeddings_and_output_weights=True),
        LLAMA_TINY,
        replace(LLAMA_TINY, disable_bias_linear=False, untie_embeddings_and_output_weights=False),
        replace(LLAMA_TINY, num_query_groups=None, kv_channels=16),
    ],
    ids=["gpt2", "gpt2-erf", "gpt2-untied", "llama", "llama-biased-tied", "llama-wide-heads"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_transformers_computes_the_same_logits(tmp_path, model, dtype):
    gpt = build_gpt(model, dtype)
    folder = convert(write_run(tmp_path / "run", model, gpt), tmp_path / "hf")
    theirs = load_wide(folder) if dtype == torch.float64 else AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(0, VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        difference = (gpt.logits(gpt.hidden(ids)) - theirs(ids).logits).abs().max()
    assert difference < (1e-12 if dtype == torch.float64 else 1e-5), difference


def test_the_way_back_gives_the_same_bits(tmp_path):
    gpt = build_gpt(GPT2_TINY)
    run = write_run(tmp_path / "run", GPT2_TINY, gpt)
    folder = convert(run, tmp_path / "hf", keep_padding=True)
    back = convert(folder, tmp_path / "back", to="holdfast")
    with open_checkpoint(run) as before, open_checkpoint(back) as after:
        after.verify()
        assert after.tensors.keys() == before.tensors.keys() and after.shared["true_vocab_size"] == VOCABULARY
        for name in before.tensors:
            assert before.tensor(name).tobytes() == after.tensor(name).tobytes(), name


def test_tokenizer_files_of_the_run_work_in_transformers(tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    run = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY), vocab_file=vocab, merge_file=merges)
    folder = convert(run, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the quick brown fox\nreturns  42 times: ümlaut"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < VOCABULARY
    assert ids == list(build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges).encode(text))
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == end == tokenizer.eos_token_id
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == end


def test_a_single_checkpoint_folder_without_its_run_is_enough(tmp_path):
    run = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    (run / "config.toml").unlink()
    folder = convert(run / "checkpoints" / "step-00000007", tmp_path / "hf", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (VOCABULARY, 32)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (replace(GPT2_TINY, num_query_groups=2), "gpt2, has num_query_groups = 4, not 2"),
        (replace(GPT2_TINY, disable_bias_linear=True), "gpt2, has disable_bias_linear = False, not True"),
        (replace(GPT2_TINY, kv_channels=16), "gpt2, has kv_channels = 8, not 16"),
        (replace(GPT2_TINY, normalization="RMSNorm"), "gpt2, has normalization = LayerNorm, not RMSNorm"),
        (replace(LLAMA_TINY, attn_logit_softcapping=5.0), "llama, has attn_logit_softcapping = 0.0, not 5.0"),
        (replace(LLAMA_TINY, use_parallel_residual=True), "llama, has use_parallel_residual = False, not True"),
    ],
)
def test_what_hugging_face_cannot_say_is_refused_with_the_reason(tmp_path, model, reason):
    run = write_run(tmp_path / "run", model, build_gpt(model))
    with pytest.raises(HoldfastError, match=reason):
        convert(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer", size=290)
    run = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    with pytest.raises(HoldfastError, match="gives 290 tokens, but the model was made for 300"):
        convert(run, tmp_path / "hf", vocab_file=vocab, merge_file=merges)
