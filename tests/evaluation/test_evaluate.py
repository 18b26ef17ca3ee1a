"""`holdfast evaluate`, beside transformers and beside the harness's own `hf` model for the same folder."""

import json
import math
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from holdfast import preprocess
from holdfast.cli import run
from holdfast.evaluation.scoring import Pair, score, windows
from holdfast.generation.engine import stream
from holdfast.generation.loading import load_model
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import GREEDY
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.families import build_family
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer
from tests.generation.conftest import gpt2, saved  # noqa: F401

TEXTS = ["the quick brown fox", "jumps over the lazy dog " * 12, "", "naïve café ☕ " * 3]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def evaluate(capsys, *arguments):
    run(["evaluate", *map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_scores_equal_transformers_and_do_not_depend_on_the_batch(saved):  # noqa: F811
    loaded = load_model(saved.huggingface)
    model = AutoModelForCausalLM.from_pretrained(saved.huggingface, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for context, continuation in ((1, 5), (7, 1), (3, loaded.max_positions), (20, 2)):
        tokens = torch.randint(loaded.tokenizer.vocab_size, (context + continuation,), generator=generator).tolist()
        pairs.append(Pair(tokens[:context], tokens[context:]))
    for pair, found in zip(pairs, score(loaded, pairs), strict=True):
        tokens = torch.tensor([[*pair.context, *pair.continuation][-loaded.max_positions - 1 :]])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0, -len(pair.continuation) :, : loaded.model.vocab_size]
        targets = torch.tensor(pair.continuation)
        expected = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
        assert found.logprob == pytest.approx(float(expected), abs=1e-3)
        assert found.greedy == bool((logits.argmax(-1) == targets).all())


def test_padding_does_not_change_scores_under_dynamic_rotary_scaling(tmp_path):
    """The base of the angles depends on the length of a text, not on that of its batch."""
    build_family("llama-dynamic").save_pretrained(tmp_path / "hf")
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    loaded = load_model(tmp_path / "hf", tokenizer={"vocab_file": vocab, "merge_file": merges})
    pair, longer = Pair(range(10, 30), range(30, 34)), Pair(range(10, 40), range(30, 44))
    alone, beside = score(loaded, [pair])[0].logprob, score(loaded, [pair, longer])[0].logprob
    assert beside == pytest.approx(alone, abs=3e-5)


def test_a_greedy_continuation_is_recognised(gpt2):  # noqa: F811
    loaded = load_model(gpt2.run)
    with torch.no_grad():
        best = int(loaded.model.logits(loaded.model.hidden(torch.tensor([[1, 2, 3]])))[0, -1].argmax())
    found = score(loaded, [Pair([1, 2, 3], [best]), Pair([1, 2, 3], [best ^ 1])])
    assert [result.greedy for result in found] == [True, False]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 24, 27])
def test_windows_are_those_of_the_harness(length):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = list(range(100, 100 + length))
    expected = map(
        make_disjoint_window, get_rolling_token_windows(tokens, prefix_token=7, max_seq_len=8, context_len=1)
    )
    assert [(pair.context, pair.continuation) for pair in windows(tokens, 7, 8)] == list(expected)


def test_a_dataset_and_its_text_give_the_same_perplexity(gpt2, corpus, tmp_path, capsys):  # noqa: F811
    tokenizer = gpt2.run.parent / "tokenizer"
    preprocess(
        input=[corpus], output_prefix=tmp_path / "data", vocab_file=tokenizer / "vocab.json",
        merge_file=tokenizer / "merges.txt", append_eod=True, workers=1,
    )  # fmt: skip
    prefix = str(tmp_path / "data_text_document")
    found = evaluate(capsys, gpt2.run, "--data-path", corpus, prefix)["perplexity"]
    assert found[str(corpus)] == found[prefix]
    text = found[prefix]
    assert text["documents"] == 3 and text["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert text["perplexity"] == pytest.approx(math.exp(text["loss"]))
    assert text["bits_per_byte"] == pytest.approx(text["loss"] * text["tokens"] / text["bytes"] / math.log(2))
    part = evaluate(capsys, gpt2.run, "--data-path", prefix, "--split", "50,25,25", "--part", "train", "--limit", "1")
    assert part["perplexity"][prefix]["documents"] == 1


@pytest.fixture
def beginning(gpt2, tmp_path):  # noqa: F811
    """The same model with a tokenizer.json that puts a token before every text."""
    folder = tmp_path / "beginning"
    shutil.copytree(gpt2.huggingface, folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = built.token_to_id("<|endoftext|>")
    built.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)])
    built.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_model(folder).tokenizer.encode("a") == [end, *load_model(gpt2.run).tokenizer.encode("a")]
    return folder


def test_a_token_that_begins_every_text_is_given_and_not_scored(gpt2, beginning, corpus, tmp_path, capsys):  # noqa: F811
    preprocess(
        input=[corpus], output_prefix=tmp_path / "data", tokenizer_type="HuggingFaceTokenizer", tokenizer_model=beginning,
        append_eod=True, workers=1,
    )  # fmt: skip
    prefix = str(tmp_path / "data_text_document")
    found = evaluate(capsys, beginning, "--data-path", corpus, prefix)["perplexity"]
    assert found[str(corpus)] == found[prefix]
    # without such a token the first one is predicted from the end-of-document token, which is the same here
    assert found[prefix] == evaluate(capsys, gpt2.run, "--data-path", corpus)["perplexity"][str(corpus)]


def test_a_context_that_is_cut_inside_a_character_is_generated_from(gpt2):  # noqa: F811
    from lm_eval.api.instance import Instance

    from holdfast.evaluation.harness import HarnessModel

    loaded = load_model(gpt2.run)
    settings = {"until": [], "max_gen_toks": 4}
    contexts = ["\U0001f98a" * 20, "x" + "\U0001f98a" * 20, "fox", ""] * 5
    requests = [Instance("generate_until", {}, (context, settings), number) for number, context in enumerate(contexts)]
    found = HarnessModel(loaded).generate_until(requests)
    for context, text in zip(contexts, found, strict=True):
        prompt = tuple(loaded.encode(context)[-(loaded.max_positions - 4) :])
        (emissions,) = [list(stream(loaded, [GenerationRequest(prompt, 4, GREEDY)]))]
        assert text == "".join(emission.text for _, emission in emissions)


TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["fox", "lazy dog", "cat"]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "writing": """
task: writing
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["\\n", "e"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three tasks over a local file; the harness and its libraries write below the test's folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": f"{word} over the", "answer": index % 3, "text": text, "expected": ""}
        for index, (word, text) in enumerate(zip(("the quick", "jumps", "fox", "lazy"), TEXTS[:2] * 2, strict=True))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
    )
    for name, definition in TASKS.items():
        (folder / f"{name}.yaml").write_text(definition + source)
    return folder


@pytest.mark.slow  # the harness reads the definitions of all its tasks first
def test_task_results_equal_those_of_the_hf_model(gpt2, beginning, tasks, capsys):  # noqa: F811
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for model, folder in ((gpt2.run, gpt2.huggingface), (beginning, beginning)):
        found = evaluate(capsys, model, "--tasks", "choices,rolling,writing", "--include-path", tasks)["tasks"]
        expected = simple_evaluate(
            model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2),
            tasks=list(TASKS), task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0,
        )["results"]  # fmt: skip
        compared = 0
        for task in TASKS:
            for metric, value in expected[task].items():
                if isinstance(value, float) and "stderr" not in metric:
                    assert found[task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
                    compared += 1
        assert compared >= 5
    with pytest.raises(UsageError, match="has no task 'choises'"):
        run(["evaluate", str(gpt2.run), "--tasks", "choises", "--include-path", str(tasks)])
    (tasks / "rows.jsonl").unlink()
    with pytest.raises(HoldfastError, match="cannot read the data of choices"):
        run(["evaluate", str(gpt2.run), "--tasks", "choices", "--include-path", str(tasks)])


def test_a_continuation_longer_than_the_positions_is_refused(gpt2):  # noqa: F811
    loaded = load_model(gpt2.run)
    with pytest.raises(HoldfastError, match="the model's positions end at 32"):
        score(loaded, [Pair([1], [2] * (loaded.max_positions + 1))])


def test_wrong_use_is_named(gpt2, corpus):  # noqa: F811
    with pytest.raises(UsageError, match="--num-fewshot -1"):
        run(["evaluate", str(gpt2.run), "--tasks", "a", "--num-fewshot", "-1"])
    with pytest.raises(UsageError, match="or --tasks NAME,NAME"):
        run(["evaluate", str(gpt2.run), "--tasks", " , "])
    with pytest.raises(UsageError, match="--data-path FILE for perplexity, or --tasks"):
        run(["evaluate", str(gpt2.run)])
    with pytest.raises(UsageError, match=r"--split divides \.bin/\.idx pairs"):
        run(["evaluate", str(gpt2.run), "--data-path", str(corpus), "--split", "1,1"])
    (corpus.parent / "empty.jsonl").write_text("")
    with pytest.raises(HoldfastError, match="no tokens to score"):
        run(["evaluate", str(gpt2.run), "--data-path", str(corpus.parent / "empty.jsonl")])
