"""One parser for every verb: words to an options dataclass and back, and mistakes that name the nearest flag."""

import inspect
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.command_line import flags
from holdfast.command_line.help import help_text
from holdfast.config import all_keys
from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.generation.command import GenerateOptions
from holdfast.system.errors import UsageError
from holdfast.train.command import TrainOptions, parse


@dataclass(frozen=True)
class Section:
    width: int = 8
    """Width."""
    bias: bool = True
    """With bias."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Do things.

    Examples:

      holdfast sample x.bin --names a b
    """

    HEADINGS: ClassVar[dict[str, str]] = {"output_prefix": "output"}

    source: Path = field(metadata=flags.positional("SRC"))
    """What to read, 100% of it."""
    names: tuple[str, ...] = ()
    """Names."""
    sizes: tuple[int, ...] = (1, 2)
    """Sizes."""
    mode: Literal["fast", "slow"] = "fast"
    """Speed."""
    rate: float | None = None
    """Rate in Hz. Unset: none."""
    compile: bool | None = None
    """Compile. Unset: on CUDA."""
    follow: bool = field(default=False, metadata=flags.short("-f"))
    """Follow."""
    output_prefix: str
    """Where to write."""
    section: Section = field(default_factory=Section)


def read(*words: str) -> Sample:
    return flags.parse(Sample, "holdfast sample", words)


def test_every_kind_of_field_is_read():
    line = "in --output-prefix out --names a b --sizes 3 --mode slow --rate 2e3 --no-compile -f --width=5 --no-bias"
    assert read(*line.split()) == Sample(
        source=Path("in"),
        output_prefix="out",
        names=("a", "b"),
        sizes=(3,),
        mode="slow",
        rate=2000.0,
        compile=False,
        follow=True,
        section=Section(5, False),
    )


def test_defaults_hold_for_what_is_not_given():
    assert read("in", "--output-prefix", "out") == Sample(source=Path("in"), output_prefix="out")


@pytest.mark.parametrize(
    "line",
    [
        "in --output_prefix out --names a",
        "--output_prefix=out in --names a",
        "--names=a --output-prefix=out in",
        "--names a --output-prefix first --output-prefix out -- in",
    ],
)
def test_underscores_equals_signs_and_any_order_are_accepted(line):
    assert read(*line.split()) == Sample(source=Path("in"), output_prefix="out", names=("a",))


def test_a_list_flag_given_twice_adds_up_and_may_be_empty():
    assert read("in", "--output-prefix", "o", "--names", "a", "--names", "b", "--sizes").names == ("a", "b")
    assert read("in", "--output-prefix", "o", "--sizes").sizes == ()


def test_a_required_list_needs_a_value():
    with pytest.raises(UsageError, match="needs --input"):
        flags.parse(PreprocessOptions, "holdfast preprocess", ["--input", "--output-prefix", "o"])


def test_values_may_look_like_numbers_or_flags():
    options = read("in", "--output-prefix=--odd_name", "--rate", "-1", "--names", "-")
    assert (options.output_prefix, options.rate, options.names) == ("--odd_name", -1.0, ("-",))
    assert read("in", "--output-prefix", "o", "--rate", "None").rate is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("in --output-prefx o", "has no flag --output-prefx; perhaps you meant --output-prefix"),
        ("in --output-prefix o --widht 3", "perhaps you meant --width"),
        ("in --output-prefix o --sise=3", "has no flag --sise; perhaps you meant --sizes"),
        ("in --output-prefix o --zzzz", "has no flag --zzzz (holdfast sample --help"),
        ("in --output-prefix o --out x", "has no flag --out"),
        ("in", "holdfast sample needs --output-prefix"),
        ("--names a", "holdfast sample needs SRC and --output-prefix"),
        ("in more --output-prefix o", "unexpected argument 'more'"),
        ("in --output-prefix", "--output-prefix needs a value"),
        ("in --output-prefix o --rate -x", "give one that starts with - as --rate=VALUE"),
        ("in --output-prefix o --follow=yes", "--follow takes no value"),
        ("in --output-prefix o --width four", "--width four: expected an integer"),
        ("in --output-prefix o --rate fast", "--rate fast: expected a number"),
        ("in --output-prefix o --mode quick", "--mode quick: choose one of fast, slow"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_flag(line, message):
    with pytest.raises(UsageError) as caught:
        read(*line.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_another_verb_is_to_read_passes_through_in_order():
    @dataclass(frozen=True)
    class Job:
        """Run it."""

        nodes: int = 1
        """Nodes."""
        command: tuple[str, ...] = field(default=(), metadata=flags.remainder("VERB ..."))
        """Verb."""

    job = flags.parse(Job, "holdfast launch", "train c.toml --num_layers 4 --nodes=2 --data-path a b --bf16".split())
    assert job == Job(2, tuple("train c.toml --num_layers 4 --data-path a b --bf16".split()))


def test_help_has_headings_defaults_and_examples_and_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(Sample, "holdfast sample")
    lines = text.splitlines()
    assert lines[0] == "usage: holdfast sample SRC --output-prefix PREFIX [flags]"
    assert max(map(len, lines)) <= 80
    assert {"Examples:", "  holdfast sample x.bin --names a b", "arguments:", "output:", "[section]:"} <= set(lines)
    joined = " ".join(text.split())
    for shown in (
        "SRC What to read, 100% of it. (required)",
        "--names TEXT ... Names. --sizes",
        "--sizes N ... Sizes. (default: 1 2)",
        "--mode fast|slow Speed. (default: fast)",
        "--rate X Rate in Hz. Unset: none. --compile, --no-compile Compile.",
        "-f, --follow Follow.",
        "--bias, --no-bias With bias. (default: on)",
    ):
        assert shown in joined


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda word: not word.startswith("-") and word != "None"
)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        PreprocessOptions,
        input=st.lists(TEXTS, min_size=1).map(tuple),
        output_prefix=TEXTS,
        vocab_file=st.none() | TEXTS,
        workers=st.none() | st.integers(),
        on_bad_line=st.sampled_from(["fail", "skip"]),
        append_eod=st.booleans(),
    )
)
def test_options_survive_their_own_command_line(options):
    assert flags.parse(PreprocessOptions, "holdfast preprocess", flags.to_arguments(options)) == options


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[model]\nnum_layers = 3\nhidden_size = 64\n[train]\nbf16 = true\n")
    config = parse([str(file), "--num_layers", "5", "--no-bf16", "--data-path", "0.3", "a", "0.7", "b"]).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (5, 64, 12)
    assert (config.train.bf16, config.data.data_path) == (False, ("0.3", "a", "0.7", "b"))


def test_the_flags_of_train_are_unique():
    names = [flag.name for flag in flags.flags_of(TrainOptions)]
    assert len(names) == len(set(names)) and set(all_keys()) <= set(names)
    assert set(names) - set(all_keys()) == {one.name for one in fields(TrainOptions)} - {"config", "vocab_size_given"}


@pytest.mark.parametrize(
    ("options", "function"),
    [(GenerateOptions, "generate")],
    ids=["generate"],
)
def test_a_verb_and_its_library_function_have_the_same_defaults(options, function):
    parameters = inspect.signature(getattr(holdfast, function)).parameters
    defaults = {
        one.name: one.default for one in fields(options) if one.name in parameters and one.default is not MISSING
    }
    assert len(defaults) > 6
    assert defaults == {name: parameters[name].default for name in defaults}
