"""Hugging Face folders: transformers loads every output, trains it, and generates the same text; every input form is read."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MegatronBertConfig,
    MegatronBertForPreTraining,
    Trainer,
    TrainingArguments,
    pipeline,
)

from holdfast import convert
from holdfast.system.errors import HoldfastError
from tests.conversion.megatron_files import Spec, as_huggingface, make_truth, write_megatron
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def build(kind):
    torch.manual_seed(5)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config)
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5)
        )
    if kind == "bert":
        return BertForPreTraining(BertConfig(**SIZES, max_position_embeddings=32))
    return MegatronBertForPreTraining(MegatronBertConfig(**SIZES, max_position_embeddings=32))


def same_weights(left, right):
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "megatron-bert"])
def test_a_model_of_transformers_comes_back_as_it_was(tmp_path, kind):
    """Through Holdfast's form, and through Megatron's where that has a place for it; from safetensors, shards and .bin."""
    model = build(kind).eval()
    model.save_pretrained(tmp_path / "original", max_shard_size="40KB")
    assert len(list((tmp_path / "original").glob("*.safetensors"))) > 1
    targets = [("holdfast", {})]
    if kind != "bert":
        targets.append(("megatron", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}))
    automatic = AutoModelForPreTraining if "bert" in kind else AutoModelForCausalLM
    for to, options in targets:
        middle = convert(tmp_path / "original", tmp_path / to, to=to, **options)
        for number, form in enumerate(({}, {"bin": True}, {"max_shard_size": "30KB"})):
            folder = convert(middle, tmp_path / f"{to}-back{number}", **form)
            same_weights(automatic.from_pretrained(folder), model)
            again = convert(folder, tmp_path / f"{to}-again{number}")
            same_weights(automatic.from_pretrained(again), model)


def test_names_without_the_head_prefix_and_old_buffers_are_understood(tmp_path):
    """As the files of GPT-2 on the hub are: no `transformer.` in front, masks stored, non-contiguous matrices in a .bin."""
    model = build("gpt2")
    state = {name.removeprefix("transformer."): t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    state["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    state["h.0.mlp.c_fc.weight"] = state["h.0.mlp.c_fc.weight"].T.contiguous().T
    folder = tmp_path / "hub"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model.config.save_pretrained(folder)
    same_weights(AutoModelForCausalLM.from_pretrained(convert(folder, tmp_path / "hf")), model)


def test_greedy_text_is_equal_before_and_after_and_the_pipeline_runs(tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    model = build("gpt2").eval()
    model.save_pretrained(tmp_path / "original")
    middle = convert(tmp_path / "original", tmp_path / "m", to="megatron", tensor_model_parallel_size=2)
    folder = convert(middle, tmp_path / "hf", vocab_file=vocab, merge_file=merges)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("the quick", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **settings), again.generate(ids, **settings))
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    text = generate("the quick", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert text.startswith("the quick")


def test_a_step_of_the_trainer_runs(tmp_path):
    build("gpt2").save_pretrained(tmp_path / "original")
    folder = convert(convert(tmp_path / "original", tmp_path / "m", to="megatron"), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = model.transformer.wte.weight.detach().clone()
    samples = [{"input_ids": torch.arange(16) + n, "labels": torch.arange(16) + n} for n in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=samples).train()
    assert not torch.equal(before, model.transformer.wte.weight)


def test_an_index_lists_every_tensor_of_the_shards(tmp_path):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "m", spec, truth, 3.0)
    folder = convert(source, tmp_path / "hf", true_vocab_size=spec.vocab, max_shard_size="4KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    merged = {}
    for shard in sorted(set(index["weight_map"].values())):
        merged |= load_file(folder / shard)
    wanted = as_huggingface(spec, truth)
    assert merged.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in wanted.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())


def test_activation_epsilon_and_dropout_come_from_args(tmp_path):
    spec = Spec()
    for number, (args, activation) in enumerate(
        [
            ({"openai_gelu": True}, "gelu_new"),
            ({"openai_gelu": False, "bias_gelu_fusion": True}, "gelu_new"),
            ({"openai_gelu": False}, "gelu"),
        ]
    ):
        source = write_megatron(
            tmp_path / f"m{number}",
            spec,
            make_truth(spec, spec.padded(1)),
            3.0,
            layernorm_epsilon=1e-4,
            hidden_dropout=0.25,
            **args,
        )
        folder = convert(source, tmp_path / f"hf{number}", true_vocab_size=spec.vocab)
        config = json.loads((folder / "config.json").read_text())
        assert (config["activation_function"], config["layer_norm_epsilon"], config["resid_pdrop"]) == (
            activation,
            1e-4,
            0.25,
        )


def test_bert_with_two_gelus_is_converted_and_said(tmp_path, capfd):
    from holdfast.cli import run

    spec = Spec(family="bert")
    args = {"openai_gelu": False, "bias_gelu_fusion": True}
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0, **args)
    run(["convert", str(source), str(tmp_path / "hf"), "--true-vocab-size", str(spec.vocab)])
    said = capfd.readouterr()
    assert "4.8e-4" in said.err and said.out == f"{tmp_path / 'hf'}\n"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["hidden_act"] == "gelu_new" and config["layer_norm_eps"] == 1e-5


def test_a_word_piece_vocabulary_becomes_a_bert_tokenizer(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s", "bark"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    spec = Spec(family="bert", vocab=len(words))
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    folder = convert(source, tmp_path / "hf", vocab_file=str(tmp_path / "vocab.txt"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("The dogs bark")["input_ids"] == [2, 5, 6, 7, 8, 3]
    assert tokenizer("dogs", "bark")["token_type_ids"] == [0, 0, 0, 0, 1, 1]


def test_broken_folders_are_refused_with_the_culprit(tmp_path):
    model = build("gpt2")
    for number, (change, said) in enumerate(
        [
            (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
            (
                lambda f: (f / "config.json").write_text('{"model_type": "t5"}'),
                "'t5' is not one that Holdfast converts",
            ),
            (lambda f: edit(f, n_head=5), "rows, which contradicts the configured heads"),
            (lambda f: edit(f, n_layer=3), "decoder.layers.2.input_layernorm.weight"),
            (lambda f: edit(f, activation_function="relu"), "'relu' cannot be converted exactly"),
            (lambda f: edit(f, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
            (cut, "is cut short"),
        ]
    ):
        folder = tmp_path / f"hf{number}"
        model.save_pretrained(folder)
        change(folder)
        with pytest.raises(HoldfastError) as caught:
            convert(folder, tmp_path / f"out{number}", to="megatron")
        assert said in str(caught.value), str(caught.value)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def test_an_existing_destination_is_never_touched(tmp_path):
    build("gpt2").save_pretrained(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(HoldfastError, match="already exists"):
        convert(tmp_path / "hf", tmp_path / "out", to="megatron")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
