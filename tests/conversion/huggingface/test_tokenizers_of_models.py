"""A model keeps its tokenizer and its special ids through every format, and a tokenizer of another model is refused."""

import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from holdfast import convert, generate
from holdfast.cli import run
from holdfast.config import Config, DataConfig, TrainConfig, read_config
from holdfast.conversion.huggingface.read import tokenizer_in
from holdfast.conversion.huggingface.tokenizer_files import check_size
from holdfast.conversion.train_load import loads_other_format
from holdfast.evaluation.scoring import Pair, score
from holdfast.generation.loading import load_model
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Tokenizer as AnyTokenizer
from holdfast.tokenizers.folder import recipe_of
from holdfast.train.checks.preflight import resolve
from holdfast.train.run_folder.identity import read_run_config
from tests.conversion.holdfast_runs import GPT2_TINY, LLAMA_TINY, VOCABULARY, build_gpt, write_run
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer
from tests.corpus import write_dataset
from tests.generation.conftest import write_bert

TEXTS = ["the quick brown fox jumps over the lazy dog and other words, such as these ones"] * 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A run with Llama's shapes and a tokenizer.json whose BOS is 0 and EOS is 1; and its Hugging Face folder."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", *(f"<{number}>" for number in range(12))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    names = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer")}
    source = write_run(folder / "run", LLAMA_TINY, build_gpt(LLAMA_TINY), **names)
    return source, convert(source, folder / "hf")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A run, its tokenizer's files, and the same weights as a Megatron folder, which names no tokenizer file."""
    folder = tmp_path_factory.mktemp("gpt2")
    vocab, merges = byte_level_tokenizer(folder / "tokenizer")
    source = write_run(folder / "run", GPT2_TINY, build_gpt(GPT2_TINY), vocab_file=vocab, merge_file=merges)
    megatron = convert(source, folder / "megatron", to="megatron", tensor_model_parallel_size=2)
    return source, megatron, {"vocab_file": vocab, "merge_file": merges}


def special_ids(folder: Path) -> tuple[int, int]:
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert config["bos_token_id"] == generation["bos_token_id"] and config["eos_token_id"] == generation["eos_token_id"]
    return config["bos_token_id"], config["eos_token_id"]


def test_bos_and_eos_are_those_of_the_tokenizer_and_survive_the_way_through_holdfast(llama, tmp_path):
    _, folder = llama
    assert special_ids(folder) == (0, 1)
    middle = convert(folder, tmp_path / "middle", to="holdfast")
    assert special_ids(convert(middle, tmp_path / "back")) == (0, 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(tmp_path / name)
    try:
        without = convert(folder, tmp_path / "without", to="holdfast")
        assert special_ids(convert(without, tmp_path / "back-without")) == (0, 1)
    finally:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).rename(folder / name)


def test_a_llama_source_keeps_its_tokenizer_type_and_can_be_used_at_once(llama, tmp_path):
    source, folder = llama
    middle = convert(folder, tmp_path / "middle", to="holdfast")
    tables = tomllib.loads((middle / "config.toml").read_text())
    assert tables["data"]["tokenizer_type"] == "HuggingFaceTokenizer"
    moved = middle.rename(tmp_path / "moved")
    config, _ = resolve(replace(read_run_config(moved / "config.toml"), train=TrainConfig(train_iters=1)))
    assert config.data.tokenizer_model == str(moved / "tokenizer" / "tokenizer.json")
    prompt, options = "the lazy", {"max_new_tokens": 4, "temperature": 0.0}
    assert generate(moved, prompt, **options) == generate(source, prompt, **options)


def test_a_bert_source_keeps_case_and_vocabulary(tmp_path):
    from transformers import BertConfig, BertForPreTraining

    from holdfast.tokenizers.training import train_tokenizer

    (vocab,) = train_tokenizer([*TEXTS, "The Quick Brown"], tmp_path / "hf", 80, "wordpiece-cased")
    size = len(vocab.read_text().splitlines())
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForPreTraining(BertConfig(vocab_size=size, **shape)).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    middle = convert(tmp_path / "hf", tmp_path / "middle", to="holdfast")
    config, _ = resolve(replace(read_run_config(middle / "config.toml"), train=TrainConfig(train_iters=1)))
    assert config.data.tokenizer_type == "BertWordPieceCase" and config.model.vocab_size == size
    assert (middle / "tokenizer" / "vocab.txt").read_bytes() == vocab.read_bytes()


def test_a_run_with_more_rows_than_tokens_converts_with_the_size_given(tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer", size=290)
    source = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY), vocab_file=vocab, merge_file=merges)
    with pytest.raises(HoldfastError, match=r"--true-vocab-size 290 .* --true-vocab-size 300"):
        convert(source, tmp_path / "hf")
    for size in (290, 300):
        folder = convert(source, tmp_path / f"hf-{size}", true_vocab_size=size, verify=True)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == size
        assert len(generate(folder, "fox", max_new_tokens=3)) == 1
    with pytest.raises(HoldfastError, match="gives 500 tokens, but the embedding has only 384 rows"):
        convert(source, tmp_path / "hf-500", true_vocab_size=500)


def test_a_sentencepiece_model_goes_with_its_run(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), vocab_size=34, minloglevel=2
    )
    names = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(tmp_path / "m.model")}
    source = write_run(tmp_path / "run", LLAMA_TINY, build_gpt(LLAMA_TINY), **names)
    folder = convert(source, tmp_path / "hf", true_vocab_size=VOCABULARY)
    assert (folder / "tokenizer.model").read_bytes() == (tmp_path / "m.model").read_bytes()
    assert special_ids(folder) == (1, 2), "SentencePiece's own"
    back = convert(folder, tmp_path / "back", to="holdfast", true_vocab_size=VOCABULARY)
    (tmp_path / "m.model").unlink()
    assert read_run_config(back / "config.toml").data.tokenizer_type == "Llama2Tokenizer"
    options = {"max_new_tokens": 4, "temperature": 0.0}
    assert generate(back, "the lazy", **options) == generate(folder, "the lazy", **options)


def test_text_comes_from_a_megatron_folder_with_the_tokenizer_given(gpt2, capsys):
    source, megatron, files = gpt2
    options = ["--prompt", "the quick", "--max-new-tokens", "5", "--temperature", "0"]
    with pytest.raises(HoldfastError, match="names no tokenizer: give --vocab-file"):
        run(["generate", str(megatron), *options])
    run(["generate", str(source), *options])
    wanted = capsys.readouterr().out
    flags = ["--vocab-file", files["vocab_file"], "--merge-file", files["merge_file"]]
    run(["generate", str(megatron), *options, *flags, "--tokenizer-type", "GPT2BPETokenizer"])
    assert capsys.readouterr().out == wanted


def test_a_tokenizer_of_another_model_is_refused(gpt2, llama, tmp_path):
    _, megatron, _ = gpt2
    larger = dict(zip(("vocab_file", "merge_file"), byte_level_tokenizer(tmp_path / "larger", 400), strict=True))
    with pytest.raises(HoldfastError, match="has 400 tokens, but the model"):
        load_model(megatron, tokenizer=larger)
    carrying = convert(llama[1], tmp_path / "carrying", to="holdfast")
    other = dict(zip(("vocab_file", "merge_file"), byte_level_tokenizer(tmp_path / "other", 290), strict=True))
    with pytest.raises(HoldfastError, match="is not the tokenizer that .* was trained with"):
        load_model(carrying, tokenizer=other)


def training(load: Path, save: Path | None, tmp_path: Path) -> Config:
    return Config(
        model=replace(GPT2_TINY, vocab_size=VOCABULARY, max_position_embeddings=32),
        data=DataConfig(data_path=(str(tmp_path / "data"),), seq_length=32),
        train=TrainConfig(train_iters=1, load=str(load), save=save and str(save)),
    )


def test_a_checkpoint_of_another_format_that_does_not_fit_is_refused_before_anything_is_written(gpt2, tmp_path):
    _, megatron, _ = gpt2
    config = training(megatron, tmp_path / "run", tmp_path)
    assert loads_other_format(config)
    wrong = replace(config, model=replace(config.model, openai_gelu=False, num_layers=3))
    with pytest.raises(
        HoldfastError, match=r"num_layers is 2 there and 3 here; openai_gelu is True there and False here"
    ):
        loads_other_format(wrong)
    with pytest.raises(HoldfastError, match=r"holdfast convert .*megatron megatron-holdfast --to holdfast"):
        loads_other_format(training(megatron, None, tmp_path))
    assert not (tmp_path / "run").exists()


def test_training_starts_from_a_megatron_folder(gpt2, tmp_path):
    _, megatron, _ = gpt2
    write_dataset(tmp_path / "data", vocab_size=VOCABULARY)
    shapes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --openai-gelu --vocab-size 300"
    flags = f"{shapes} --lr 0 --train-iters 1 --eval-interval 0 --no-tensorboard --data-path {tmp_path}/data"
    command = [sys.executable, "-m", "holdfast.cli", "train", *flags.split(), "--load", str(megatron)]
    done = subprocess.run([*command, "--save", str(tmp_path / "run")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert read_config(tmp_path / "run" / "config.toml").train.load == str(megatron)
    from holdfast.checkpoint.reader import open_checkpoint

    with open_checkpoint(tmp_path / "run") as after, open_checkpoint(gpt2[0]) as before:
        for name in ("model.embedding.word_embeddings.weight", "model.decoder.final_layernorm.weight"):
            assert (after.tensor(name)[:VOCABULARY] == before.tensor(name)[:VOCABULARY]).all(), name


def saved_with_more_tokens(folder, kind):
    """A model and its tokenizer as transformers 4 saves them: vocabulary files, and a tokenizer.json that has more tokens."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    if kind == "gpt2":
        vocab, merges = byte_level_tokenizer(folder)
        Path(vocab).rename(folder / "vocab.json")
        Path(merges).rename(folder / "merges.txt")
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    else:
        write_bert(folder, "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["Hellothere"])
    tokenizer.save_pretrained(folder)
    if kind == "gpt2":
        torch.manual_seed(1)
        sizes = {"n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return tokenizer


def test_tokens_that_were_added_to_a_gpt2_tokenizer_are_read_and_written(tmp_path):
    theirs = saved_with_more_tokens(tmp_path / "hf", "gpt2")
    text = "<|im_start|>the Hellothere fox<|im_end|>"
    for folder in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "run", to="holdfast", verify=True)):
        loaded = load_model(folder)
        assert loaded.encode(text) == theirs.encode(text) and loaded.model.vocab_size == len(theirs)
        assert loaded.tokenizer.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_tokens_that_were_added_to_a_bert_tokenizer_are_read(tmp_path):
    theirs = saved_with_more_tokens(tmp_path / "hf", "bert")
    found = tokenizer_in(tmp_path / "hf", "bert", len(theirs))
    text = "the [MASK] Hellothere fox"
    tokenizer = AnyTokenizer(recipe_of(found))
    assert tokenizer.encode(text) == theirs.encode(text) and tokenizer.mask == theirs.mask_token_id


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json"])
def test_added_tokens_for_which_the_model_has_no_row_do_not_count(gpt2, tmp_path, name):
    """A padding token, added without making the embedding larger."""
    source, _, _ = gpt2
    folder = convert(source, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    stated = (
        {"added_tokens": [{"id": VOCABULARY, "content": "[PAD]"}]}
        if name == "tokenizer.json"
        else {"[PAD]": VOCABULARY}
    )
    (folder / name).write_text(json.dumps(stated))
    assert load_model(folder).tokenizer.recipe.tokenizer_type == "GPT2BPETokenizer"


def test_added_tokens_without_a_tokenizer_json_are_refused_and_not_ignored(tmp_path):
    saved_with_more_tokens(tmp_path / "hf", "gpt2")
    (tmp_path / "hf/tokenizer.json").unlink()
    (tmp_path / "hf/added_tokens.json").write_text('{"<|im_start|>": 300}')
    with pytest.raises(HoldfastError, match="with added tokens need a tokenizer.json"):
        load_model(tmp_path / "hf")
    (tmp_path / "hf/added_tokens.json").write_text('{"<|endoftext|>": 299}')
    assert load_model(tmp_path / "hf").tokenizer.recipe.tokenizer_type == "GPT2BPETokenizer"


def test_a_tokenizer_of_gemmas_size_is_read_and_a_larger_one_is_refused(tmp_path):
    """580,000 merges, as pairs since transformers 4.45, with 256,000 tokens."""
    path = tmp_path / "tokenizer.json"
    vocabulary, merges = ",".join(['"a":1'] * 256_000), ",".join(['["a","b"]'] * 580_604)
    path.write_text(f'{{"vocab":{{{vocabulary}}},"merges":[{merges}]}}')
    check_size(path)
    path.write_text(f"[{','.join(['[]'] * 1_500_001)}]")
    with pytest.raises(HoldfastError, match="values, which no tokenizer has"):
        check_size(path)


def test_a_token_added_without_a_row_in_the_model_is_accepted_and_cannot_be_used(llama, tmp_path):
    """As in folders of Llama 2 with a padding token."""
    _, source = llama
    folder = shutil.copytree(source, tmp_path / "hf")
    plain = load_model(source)
    definition = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition["added_tokens"].append({"id": VOCABULARY, "content": "<pad>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    run = convert(folder, tmp_path / "run", to="holdfast", verify=True)
    for path in (folder, run, convert(run, tmp_path / "back", verify=True)):
        loaded = load_model(path)
        assert loaded.model.vocab_size == plain.model.vocab_size == VOCABULARY
        options = {"max_new_tokens": 9, "temperature": 0}
        assert generate(loaded, "the quick", **options) == generate(plain, "the quick", **options)
        with pytest.raises(HoldfastError, match="token ids outside"):
            generate(loaded, "the <pad>", **options)
        with pytest.raises(HoldfastError, match=f"holds the token {VOCABULARY}"):
            score(loaded, [Pair([1], loaded.encode("the <pad>"))])
    definition["model"]["vocab"]["another token"] = VOCABULARY + 1
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(HoldfastError, match="it is not the tokenizer of this model"):
        load_model(folder)
