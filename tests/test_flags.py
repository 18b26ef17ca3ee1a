"""Command lines read quickly: the same values as tyro's, or left to tyro."""

import contextlib
import functools
import inspect
import io
import subprocess
import sys

import pytest
import tyro
from hypothesis import event, given, settings
from hypothesis import strategies as st

from holdfast import flags
from holdfast.assets.command import fetch
from holdfast.data.command import merge, preprocess, train_tokenizer
from holdfast.snapshot.command import persist

COMMANDS = [preprocess, merge, train_tokenizer]
VALUES = ["a", "a b", "3", "07", "", "-", "-3", "None", "True", "fast", "bpe", "skip", "é", "²", "--", "--json"]
ODD = ["--no-append-eod", "--output_prefix", "--output-prefix=x", "--workers=2", "--outpu", "-h", "x", "--"]


@st.composite
def command_lines(draw, command):
    """Flags in any order, some twice, most of those that must be there; with one, several or no words that may be right."""
    parameters = inspect.signature(command).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    names = draw(st.permutations(required + draw(st.lists(st.sampled_from(list(parameters)), max_size=3))))
    line = []
    for name in names:
        count = 0 if parameters[name].default is False else 1
        count = draw(st.sampled_from([count] * 6 + [0, 1, 2]))
        line += [
            f"--{name.replace('_', '-')}",
            *draw(st.lists(st.sampled_from(VALUES), min_size=count, max_size=count)),
        ]
    return line + draw(st.sampled_from([[]] * 8 + [[odd] for odd in ODD]))


def by_tyro(command, arguments):
    """The values that tyro reads; None where it finds a mistake or shows its help."""

    @functools.wraps(command)
    def capture(**values):
        return values

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return tyro.cli(flags.for_tyro(capture), args=arguments, config=(tyro.conf.OmitArgPrefixes,))
        except SystemExit:
            return None


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_what_is_read_without_tyro_is_what_tyro_reads(command, data):
    arguments = data.draw(command_lines(command))
    plain = flags.read_plainly(command, arguments)
    event("left to tyro" if plain is None else "read without tyro")
    if plain is not None:
        assert by_tyro(command, arguments) == plain


@pytest.mark.parametrize("command", [fetch, persist])
def test_a_command_with_arguments_without_flags_is_left_to_tyro(command):
    assert flags.read_plainly(command, []) is None
    assert flags.read_plainly(command, ["--json"]) is None


def test_a_plain_line_of_preprocess_needs_no_tyro():
    line = "--input a b --output-prefix c --tokenizer-type GPT2BPETokenizer --vocab-file v --append-eod --workers 2"
    values = flags.read_plainly(preprocess, line.split())
    assert values == by_tyro(preprocess, line.split())
    assert (values["input"], values["append_eod"], values["workers"]) == (("a", "b"), True, 2)
    # A command that fails shows who called it.
    program = "from holdfast import cli; cli.run(['merge', '--input', 'nothing', '--output-prefix', 'all'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "HoldfastError" in ended.stderr and "tyro" not in ended.stderr
