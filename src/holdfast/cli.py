"""The program `holdfast`: finds the function of a verb and calls it with the options of the command line.

A verb is a function with one parameter, `options`, whose annotation is the dataclass of its flags. Its module is imported when
the verb is called, and torch only by its work: no `--help` loads torch.
"""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.system.errors import HoldfastError, UsageError

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("holdfast.demo.command:demo_command", "run the whole path here, with a rank killed on the way"),
    "init": ("holdfast.demo.project:init", "write a configuration and a Makefile for your own text"),
    "fetch": (
        "holdfast.assets.command:fetch",
        "download files exactly once, for any number of processes",
    ),
    "fetch-storm": ("holdfast.assets.command:fetch_storm", "fetch from many ranks at once, and count the downloads"),
    "tokenizer train": ("holdfast.data.command:train_tokenizer", "train a tokenizer on your own text"),
    "preprocess": ("holdfast.data.command:preprocess", "convert text to a Megatron dataset (.bin/.idx)"),
    "merge": ("holdfast.data.command:merge", "join several .bin/.idx datasets into one"),
    "train": (
        "holdfast.train.command:train_command",
        "pretrain GPT or BERT, TP × PP × DP; resume after failures",
    ),
    "snapshots": (
        "holdfast.snapshot.command:snapshots",
        "show the snapshots of a run in memory and on disk",
    ),
    "persist": ("holdfast.snapshot.command:persist", "write a run's newest memory snapshot to disk now"),
    "report": (
        "holdfast.report.command:report_command",
        "draw runs as one page: curves, goodput, failures, resumes",
    ),
    "inspect": ("holdfast.inspection:inspect", "describe a file or folder, and check it"),
    "convert": (
        "holdfast.conversion.command:convert",
        "convert Megatron ↔ Hugging Face ↔ Holdfast, any layout",
    ),
    "generate": (
        "holdfast.generation.command:generate_command",
        "generate text from a run, checkpoint or Hugging Face folder",
    ),
    "evaluate": (
        "holdfast.evaluation.command:evaluate_command",
        "measure perplexity, and the tasks of lm-evaluation-harness",
    ),
    "serve": (
        "holdfast.serve.command:serve_command",
        "serve a model over HTTP: OpenAI's API and a playground",
    ),
    "launch slurm": ("holdfast.launch.command:launch_slurm", "submit a Slurm job that requeues itself and resumes"),
    "launch kubernetes": ("holdfast.launch.command:launch_kubernetes", "render or apply a Kubernetes job"),
    "launch dask": ("holdfast.launch.command:launch_dask", "preprocess on the workers of a Dask cluster"),
    "launch image": ("holdfast.launch.command:launch_image", "build the container image, or import it for Slurm"),
    "launch status": ("holdfast.launch.command:launch_status", "show the state of a launched run"),
    "launch logs": ("holdfast.launch.command:launch_logs", "show what the jobs of a run print"),
    "launch stop": ("holdfast.launch.command:launch_stop", "end a run's jobs; training persists first"),
    "launch resume": ("holdfast.launch.command:launch_resume", "submit a stopped run again"),
    "doctor": ("holdfast.launch.command:doctor", "check this machine before a job runs on it"),
    "bench fetch": ("holdfast.bench.fetch:bench", "measure 64 processes that fetch at once, and a cached fetch"),
    "bench preprocess": ("holdfast.bench.preprocess:bench", "measure text to .bin/.idx, merging, random reads"),
    "bench train": ("holdfast.bench.train:bench", "measure training steps beside plain GPT-2 and Hugging Face"),
    "bench snapshot": ("holdfast.bench.snapshot:bench", "measure a snapshot at every step, beside torch.save and DCP"),
    "bench restart": ("holdfast.bench.restart:bench", "measure kill -9 of a rank to the next completed step"),
    "bench convert": ("holdfast.bench.convert:bench", "measure a 345M release zip to a Hugging Face folder"),
    "bench generate": ("holdfast.bench.generate:bench", "measure generation beside Hugging Face's generate"),
    "completion": (
        "holdfast.command_line.completion:completion",
        "print a script that completes verbs and flags in your shell",
    ),
}
HEADINGS = {
    "demo": "start",
    "fetch": "text to data",
    "train": "training",
    "convert": "models",
    "launch slurm": "clusters",
    "bench fetch": "measurements",
    "completion": "shell",
}
"""Verb → the heading in the help for this verb and those after it."""


def find_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The verb (one word, or two as in `tokenizer train`) and its arguments."""
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if len(arguments) >= words and verb in VERBS:
            return verb, list(arguments[words:])
    import difflib

    word, *rest = arguments
    inner = sub_verbs(word)
    if inner:
        problem = f"there is no verb '{word} {rest[0]}'" if rest else f"'{word}' needs a second word"
        raise UsageError(f"{problem}; choose one of: {', '.join(inner)} (holdfast {word} --help describes them)")
    near = difflib.get_close_matches(
        word, {name for verb in VERBS for name in (verb, verb.split()[0])}, n=3, cutoff=0.5
    )
    hint = f"; perhaps you meant: {', '.join(near)}" if near else ""
    raise UsageError(f"there is no verb '{word}'{hint} (holdfast --help lists them all)")


def sub_verbs(word: str) -> list[str]:
    return [verb for verb in VERBS if verb.split()[0] == word and verb != word]


def help_text(word: str | None = None) -> str:
    """All verbs under their headings, or those that start with a word."""
    import textwrap

    from holdfast.command_line.help import help_width

    width = help_width()
    verbs = sub_verbs(word) if word else list(VERBS)
    indent = max(len(verb) for verb in verbs) + 4
    lines = []
    for verb in verbs:
        if not word and verb in HEADINGS:
            lines += ["", f"{HEADINGS[verb]}:"]
        first, *rest = textwrap.wrap(VERBS[verb][1], width - indent, break_on_hyphens=False)
        lines += [f"  {verb}".ljust(indent) + first, *(" " * indent + line for line in rest)]
    if word:
        head = f"usage: holdfast {word} VERB ..."
        foot = f"holdfast {word} VERB --help shows the flags of a verb, with examples."
        return "\n".join([head, "", *lines, "", foot])
    head = "usage: holdfast VERB ...\n\nFrom raw text to a generating language model; training resumes after failures."
    foot = "holdfast demo runs the whole path on this machine.\nholdfast VERB --help shows the flags of a verb, with examples."
    return "\n".join([head, *lines, "", foot])


def load(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def run(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
    elif arguments[0] in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}")
    elif sub_verbs(arguments[0]) and arguments[1:2] in (["-h"], ["--help"]):
        print(help_text(arguments[0]))
    else:
        from holdfast.command_line import flags

        verb, rest = find_verb(arguments)
        command = load(VERBS[verb][0])
        command(flags.parse(flags.options_of(command), f"holdfast {verb}", rest))


def main() -> None:
    from holdfast.system.standard_streams import prepare_standard_streams

    prepare_standard_streams()
    arguments = sys.argv[1:]
    try:
        run(arguments)
        # The process ends here: a last garbage collection would take longer than all other steps of the exit. Triton
        # reports what the exit leaves uncollected, line by line.
        if "triton" not in sys.modules:
            gc.freeze()
    except UsageError as error:
        fail(str(error), 2)
    except HoldfastError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        _end_interrupted()
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except UnicodeEncodeError as error:
        if "\udc80" <= error.object[error.start] <= "\udcff":  # a byte of an argument or of a file's name
            near = error.object[max(0, error.start - 40) : error.end + 40].splitlines()
            fail(f"{near}: a name that is not UTF-8 text cannot be written to a file; rename it", 1)
        raise
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 1)


def _end_interrupted() -> None:
    """Ends without taking the interpreter down: a library's thread that still runs, and calls into it, would crash."""
    print("holdfast: error: interrupted; no partial output was left behind", file=sys.stderr)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(130)


def fail(message: str, code: int) -> None:
    print(f"holdfast: error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
