"""The work and the output of `holdfast generate`: texts on stdout as they are generated, or one JSON array at the end.

Several texts are generated in one batch and printed one after the other, each as far as it is known.
"""

import codecs
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TextIO

from holdfast.generation.command import GenerateOptions, check_utf8
from holdfast.generation.engine import Completion, Completions, spread, stream
from holdfast.generation.loading import LoadedModel, load_model
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import Sampling
from holdfast.generation.speculation import NGRAM, load_draft
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of, log


def generate_and_print(options: GenerateOptions, prompts: Sequence[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not be UTF-8; a text can hold every character
        sys.stdout.reconfigure(errors="backslashreplace")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)
    stops = tuple(stop.replace("\\n", "\n").replace("\\t", "\t") for stop in options.stop)
    wanted = GenerationRequest(
        (), options.max_new_tokens, sampling, options.seed, stops, options.logprobs, options.sliding_window
    )
    loaded = load_model(options.model, tokenizer=options.tokenizer_names(), weights=options.weights)
    if options.compile:
        loaded.compile()
    write = partial(_write, loaded, options, _draft(loaded, options.speculate))
    if options.interactive:
        return _interact(write, wanted)
    written = write(prompts, wanted, None if options.json else sys.stdout)
    if options.json:
        plain = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        print(json.dumps([_json(loaded, completion, options) for completion in written], ensure_ascii=plain))
    total = sum(len(completion.tokens) for completion in written)
    seconds = max(len(c.tokens) / c.tokens_per_s for c in written if c.tokens) if total else 0.0
    first = min(completion.time_to_first_token_s for completion in written)
    speed = f" ({total / seconds:.1f} tokens/s, the first after {first:.2f} s)" if total else ""
    log(f"{count_of(total, 'token')} in {seconds:.2f} s{speed}")


def _draft(loaded: LoadedModel, speculate: str | None) -> str | LoadedModel | None:
    """The draft model, loaded once for all texts."""
    return speculate if speculate is None or speculate == NGRAM else load_draft(speculate, loaded)


def _write(
    loaded: LoadedModel,
    options: GenerateOptions,
    draft: str | LoadedModel | None,
    prompts: Sequence[str],
    wanted: GenerationRequest,
    out: TextIO | None,
) -> list[Completion]:
    """Generates the texts; prints them as they grow if there is an output."""
    copies = options.num_return_sequences
    requests = spread(loaded, prompts, copies, wanted)
    sources = [prompt for prompt in prompts for _ in range(copies)]
    completions, emissions = Completions(sources), stream(loaded, requests, draft)
    printer = Printer(sources, out) if out else None
    for number, emission in emissions:
        completions.add(number, emission)
        if printer:
            printer.add(number, emission.text, ended=emission.finish_reason is not None)
    return completions.all()


class Printer:
    """Prints texts in their order, with a line between them; the current one piece by piece."""

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._out, self._current = out, 0
        self._waiting = list(prompts)
        self._ended = [False] * len(prompts)
        self.add(0, "", ended=False)

    def add(self, number: int, text: str, ended: bool) -> None:
        self._waiting[number] += text
        self._ended[number] = ended
        while self._current < len(self._waiting):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._ended[self._current]:
                break
            self._current += 1
            self._out.write("\n---\n" if self._current < len(self._waiting) else "\n")
        self._out.flush()


def _interact(write: Callable[..., list[Completion]], wanted: GenerationRequest) -> None:
    """Continues each line of standard input; every line has a seed of its own."""
    log("type a prompt and press Enter; Ctrl-C ends a text, Ctrl-D the program")
    for number, line in zip(count(), _lines(), strict=False):
        try:
            check_utf8(line)
            write([line], replace(wanted, seed=wanted.seed + number), sys.stdout)
        except KeyboardInterrupt:
            print(flush=True)
        except HoldfastError as error:
            log(f"error: {error}")


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing and history for input()
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        try:
            line = input()
        except KeyboardInterrupt:  # at the prompt, perhaps a moment after the text has ended
            sys.stderr.write("\n")
            continue
        except EOFError:
            sys.stderr.write("\n")
            return
        except UnicodeDecodeError as error:
            log(f"error: the line is not UTF-8 text ({error.reason})")
            continue
        yield line


def _json(loaded: LoadedModel, completion: Completion, options: GenerateOptions) -> dict[str, Any]:
    found = {
        "prompt": completion.prompt,
        "completion": completion.completion,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "tokens_per_s": round(completion.tokens_per_s, 2),
        "time_to_first_token_s": round(completion.time_to_first_token_s, 4),
    }
    if options.logprobs is not None:  # empty for a text that ends before its first token
        decode = loaded.tokenizer.decode
        found["logprobs"] = [
            {
                "token": token,
                "text": decode([token]),
                "logprob": logprobs.chosen,
                "top": [{"token": other, "text": decode([other]), "logprob": value} for other, value in logprobs.top],
            }
            for token, logprobs in zip(completion.tokens, completion.logprobs or (), strict=True)
        ]
    return found
