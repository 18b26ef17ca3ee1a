"""Streamed text is the final text: characters split across tokens, byte fallback, stop strings."""

import random

import pytest

from holdfast.generation.text_stream import INCOMPLETE, TextStream
from holdfast.tokenizers import build_tokenizer
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer

TEXT = "the quick 🦊 jumps over 日本語 and naïve 👩‍👩‍👧‍👦 dogs\n\n«ЖÆ» — the\tend 🇫🇷 of the 漢字 text " * 3


@pytest.fixture(scope="module", params=["bytes", "fallback", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        return build_tokenizer("GPT2BPETokenizer", *byte_level_tokenizer(folder))
    if request.param == "sentencepiece":
        return build_tokenizer("SentencePieceTokenizer", tokenizer_model=trained_sentencepiece(folder))
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=trained_fallback(folder))


def trained_sentencepiece(folder):
    import sentencepiece

    (folder / "text.txt").write_text("the quick fox jumps over the lazy dogs and the other end of the text\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), vocab_size=320, byte_fallback=True,
        model_type="bpe", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder / "m.model"


def trained_fallback(folder):
    """A tokenizer.json as Llama 2 has it: pieces with spaces as ▁, other characters as byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = ["▁", *sorted(set("thequickjumpsoverandofx"))]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "he", "▁the"]
    vocabulary = {name: number for number, name in enumerate(names)}
    built = Tokenizer(
        models.BPE(vocabulary, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def pieces_of(tokenizer, tokens, stop=()):
    stream = TextStream(tokenizer.decode, stop, tokenizer.byte_tokens)
    pieces = [stream.add(token) for token in tokens]
    return [*pieces, stream.finish()]


def test_the_pieces_are_whole_characters_and_together_the_text(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > len(TEXT)  # emoji and CJK take several tokens each
    pieces = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any(INCOMPLETE in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 60  # not all at the end


def test_bytes_that_are_no_characters_come_out_as_in_the_final_text(tokenizer):
    numbers = random.Random(1)
    plain = tokenizer.encode("the quick 🦊")
    for _ in range(60):
        tokens = [
            numbers.choice(plain) if numbers.random() < 0.5 else numbers.randrange(3, tokenizer.vocab_size)
            for _ in range(numbers.randint(1, 90))
        ]
        assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("stop", [("over 日",), ("nowhere", "dogs\n\n"), ("👧",), ("zzz",), ("t", "the q")])
def test_a_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(tokenizer, stop):
    tokens = tokenizer.encode(TEXT)
    whole = tokenizer.decode(tokens)
    ends = [whole.index(text) for text in stop if text in whole]
    expected = whole[: min(ends)] if ends else whole
    shown = ""
    for piece in pieces_of(tokenizer, tokens, stop):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


def test_an_early_end_shows_what_was_held_back(tokenizer):
    tokens = tokenizer.encode("the 🦊")
    for count in range(len(tokens) + 1):
        assert "".join(pieces_of(tokenizer, tokens[:count])) == tokenizer.decode(tokens[:count])
    held = tokenizer.encode("the end of")
    assert "".join(pieces_of(tokenizer, held, ("ofx",))) == tokenizer.decode(held)


@pytest.mark.parametrize("seconds", [float("inf"), 0.001])
def test_text_that_is_decoded_seldom_is_the_same_text(tokenizer, seconds):
    ids = tokenizer.encode(TEXT)
    stream = TextStream(tokenizer.decode, (), tokenizer.byte_tokens, seconds)
    pieces = [stream.add(token) for token in ids]
    assert seconds < 1 or not any(pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    assert not any(INCOMPLETE in piece for piece in pieces)
