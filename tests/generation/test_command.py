"""`holdfast generate` as a user calls it."""

import io
import json
import os
import subprocess
import sys

import pytest

from holdfast import convert, generate
from holdfast.cli import run
from holdfast.generation.command import GenerateOptions
from holdfast.generation.engine import Completion
from holdfast.generation.loading import load_model
from holdfast.generation.printing import Printer, _json
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import GREEDY
from holdfast.generation.slots import SlotEngine
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.holdfast_runs import GPT2_TINY, VOCABULARY, build_gpt, write_run
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer


def test_json_has_prompt_completion_text_tokens_speed_and_the_reason_of_the_end(gpt2, capsys):
    run(
        [
            "generate",
            str(gpt2.run),
            "--prompt",
            "the quick",
            "fox",
            "--max-new-tokens",
            "4",
            "--temperature",
            "0",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in found] == ["the quick", "fox"]
    for entry in found:
        assert entry["text"] == entry["prompt"] + entry["completion"] and len(entry["tokens"]) <= 4
        assert entry["finish_reason"] in ("stop", "length") and entry["tokens_per_s"] > 0
        assert entry["time_to_first_token_s"] > 0 and "logprobs" not in entry


def test_log_probabilities_are_part_of_the_json(gpt2, capsys):
    run(["generate", str(gpt2.run), "--prompt", "fox", "--max-new-tokens", "3", "--json", "--logprobs", "2"])
    (entry,) = json.loads(capsys.readouterr().out)
    assert [found["token"] for found in entry["logprobs"]] == entry["tokens"]
    assert all(len(found["top"]) == 2 and found["logprob"] <= 0 for found in entry["logprobs"])
    with pytest.raises(UsageError, match="add --json"):
        run(["generate", str(gpt2.run), "--prompt", "fox", "--logprobs", "2"])


def test_plain_output_is_text_on_stdout_with_a_line_between_texts(gpt2, capsys):
    run(["generate", str(gpt2.run), "--prompt", "fox", "--num-return-sequences", "2", "--max-new-tokens", "3"])
    out = capsys.readouterr().out
    expected = generate(gpt2.run, "fox", num_return_sequences=2, max_new_tokens=3)
    assert out == "\n---\n".join(completion.text for completion in expected) + "\n"


def test_texts_appear_while_they_are_written_in_the_order_of_the_prompts():
    out = io.StringIO()
    printer = Printer(["a", "b", "c"], out)
    printer.add(1, "2", ended=False)
    assert out.getvalue() == "a"
    printer.add(0, "1", ended=False)
    assert out.getvalue() == "a1"
    printer.add(2, "3", ended=True)
    printer.add(0, "", ended=True)
    assert out.getvalue() == "a1\n---\nb2"
    printer.add(1, "!", ended=True)
    assert out.getvalue() == "a1\n---\nb2!\n---\nc3\n"


def test_without_a_prompt_a_text_starts_from_the_end_of_document_token(gpt2, capsys):
    loaded = load_model(gpt2.run)
    run(["generate", str(gpt2.run), "--max-new-tokens", "5", "--temperature", "0", "--json"])
    (entry,) = json.loads(capsys.readouterr().out)
    engine = SlotEngine(loaded, 1)
    engine.submit(GenerationRequest((loaded.tokenizer.eod,), 5, GREEDY))
    tokens = []
    while engine.has_work:
        tokens += [emission.token for emission in engine.step() if emission.token is not None]
    assert entry["prompt"] == "" and entry["tokens"] == tokens
    assert generate(loaded, max_new_tokens=5, temperature=0)[0].tokens == tuple(tokens)


def test_a_stop_string_ends_the_text_before_it(gpt2, capsys):
    (whole,) = generate(gpt2.run, "the quick", max_new_tokens=12, seed=3)
    middle = whole.completion[4:6]
    cut = whole.completion.index(middle)
    arguments = ["--prompt", "the quick", "--max-new-tokens", "12", "--seed", "3", "--stop", middle, "--json"]
    run(["generate", str(gpt2.run), *arguments])
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["completion"] == whole.completion[:cut] and entry["finish_reason"] == "stop"


def test_interactive_continues_each_line_until_the_input_ends(gpt2, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("fox\n" + "the " * 40 + "\nthe lazy\n"))
    run(["generate", str(gpt2.run), "--interactive", "--max-new-tokens", "3", "--temperature", "0"])
    captured = capsys.readouterr()
    expected = [generate(gpt2.run, prompt, max_new_tokens=3, temperature=0)[0] for prompt in ("fox", "the lazy")]
    assert captured.out == "".join(f"{completion.text}\n" for completion in expected)
    assert "error: the prompt has" in captured.err  # and the next line is still served


def test_prompts_come_from_a_file_or_standard_input(gpt2, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the lazy dog")
    monkeypatch.setattr("sys.stdin", io.StringIO("the lazy dog"))
    arguments = ["generate", str(gpt2.run), "--max-new-tokens", "3", "--temperature", "0", "--prompt-file"]
    run([*arguments, str(tmp_path / "prompt.txt")])
    from_file = capsys.readouterr().out
    run([*arguments, "-"])
    assert capsys.readouterr().out == from_file and from_file.startswith("the lazy dog")


def test_a_prompt_file_that_is_not_utf8_is_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "latin1.txt").write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin1\.txt is not UTF-8 text \(byte 2"):
        run(["generate", "model", "--prompt-file", str(tmp_path / "latin1.txt")])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfea"), "utf-8"))
    with pytest.raises(UsageError, match="standard input is not UTF-8"):
        run(["generate", "model", "--prompt-file", "-"])


def test_a_megatron_checkpoint_generates_with_the_tokenizer_that_the_flags_name(gpt2, tmp_path, capsys):
    expected = generate(gpt2.run, "the quick", max_new_tokens=6, temperature=0)[0]
    folder = convert(gpt2.run, tmp_path / "megatron", to="megatron", tensor_model_parallel_size=2)
    arguments = ["--prompt", "the quick", "--max-new-tokens", "6", "--temperature", "0"]
    tokenizer = gpt2.run.parent / "tokenizer"
    files = ["--vocab-file", str(tokenizer / "vocab.json"), "--merge-file", str(tokenizer / "merges.txt")]
    run(["generate", str(folder), *arguments, *files])
    assert capsys.readouterr().out == expected.text + "\n"
    single = convert(gpt2.run, tmp_path / "single", to="megatron")
    run(["generate", str(next(single.rglob("*.pt"))), *arguments, *files])
    assert capsys.readouterr().out == expected.text + "\n"
    with pytest.raises(HoldfastError, match="names no tokenizer: give --vocab-file"):
        run(["generate", str(folder), *arguments])
    vocab, merges = byte_level_tokenizer(tmp_path / "larger", size=VOCABULARY + 100)
    with pytest.raises(HoldfastError, match="not the tokenizer of this model"):
        run(["generate", str(folder), *arguments, "--vocab-file", vocab, "--merge-file", merges])


def test_another_tokenizer_than_the_runs_own_is_refused_even_of_the_same_size(gpt2, tmp_path):
    run_folder = convert(gpt2.huggingface, tmp_path / "run", to="holdfast")  # carries its tokenizer
    tokenizer = json.loads((gpt2.run.parent / "tokenizer" / "vocab.json").read_text())
    first, second = list(tokenizer)[20:22]
    tokenizer[first], tokenizer[second] = tokenizer[second], tokenizer[first]
    (tmp_path / "vocab.json").write_text(json.dumps(tokenizer))
    merges = gpt2.run.parent / "tokenizer" / "merges.txt"
    files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(merges)]
    with pytest.raises(HoldfastError, match="is not the tokenizer that"):
        run(["generate", str(run_folder), "--prompt", "a", *files])


def test_a_tokenizer_far_smaller_than_the_vocabulary_is_refused_and_padding_is_not(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.generation.loading.MOST_PADDING", 16)
    folder = convert(gpt2.run, tmp_path / "megatron", to="megatron")
    for size, matching in ((VOCABULARY - 5, True), (VOCABULARY - 35, False)):
        vocab, merges = byte_level_tokenizer(tmp_path / str(size), size=size)
        arguments = ["generate", str(folder), "--max-new-tokens", "1", "--vocab-file", vocab, "--merge-file", merges]
        if matching:
            run(arguments)
            continue
        with pytest.raises(HoldfastError, match="not the tokenizer of this model"):
            run(arguments)


def test_a_model_whose_training_has_diverged_is_refused(tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    for number, value in enumerate((float("nan"), float("inf"))):
        model = build_gpt(GPT2_TINY)
        model.decoder.layers["1"].mlp.linear_fc1.weight.data[3, 4] = value
        folder = write_run(tmp_path / str(number), GPT2_TINY, model, vocab_file=vocab, merge_file=merges)
        with pytest.raises(HoldfastError, match=r"linear_fc1\.weight holds values that are not finite"):
            load_model(folder)


def test_a_text_without_tokens_has_log_probabilities_too(gpt2):
    options = GenerateOptions(model="", logprobs=1)
    assert _json(load_model(gpt2.run), Completion("a", "", (), "stop"), options)["logprobs"] == []


def test_an_output_that_is_not_utf8_gets_escaped_characters(gpt2):
    command = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "generate",
        str(gpt2.run),
        "--prompt",
        "\u00fc",
        "--max-new-tokens",
        "1",
    ]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for flags in ([], ["--json"]):
        ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, env=environment)
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)[0]["prompt"] == "\u00fc" if flags else ended.stdout.startswith("\\xfc")


def test_the_first_token_does_not_wait_for_the_compiler_to_be_imported(gpt2):
    program = (
        "import sys; from holdfast.cli import run; run(sys.argv[1:]);"
        "print(sorted({'torch._dynamo', 'triton', 'sympy', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    arguments = ["generate", str(gpt2.run), "--prompt", "fox", "--max-new-tokens", "3", "--temperature", "0.5"]
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr.endswith("[]\n"), ended.stderr


def test_wrong_use_is_named(gpt2, tmp_path):
    with pytest.raises(UsageError, match="leave out --prompt"):
        run(["generate", str(gpt2.run), "--interactive", "--prompt", "a"])
    with pytest.raises(UsageError, match="leave out --prompt, --prompt-file and --interactive"):
        run(["generate", str(gpt2.run), "--fill-mask", "a [MASK]", "--interactive"])
    for flag in ("--prompt", "--stop", "--fill-mask"):
        with pytest.raises(UsageError, match=r"'a\\udcff' is not UTF-8 text"):
            run(["generate", str(gpt2.run), flag, "a\udcff"])
    with pytest.raises(UsageError, match="min_p"):
        run(["generate", str(gpt2.run), "--min-p", "2"])
    with pytest.raises(HoldfastError, match="missing"):
        run(["generate", str(tmp_path / "missing"), "--prompt", "a"])
    with pytest.raises(FileNotFoundError, match="prompt.txt"):
        run(["generate", str(gpt2.run), "--prompt-file", str(tmp_path / "prompt.txt")])
