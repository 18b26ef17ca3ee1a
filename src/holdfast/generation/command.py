"""`holdfast generate MODEL`."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import tyro

from holdfast.errors import UsageError


def generate_command(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    *,
    prompt: tuple[str, ...] = (),
    prompt_file: Path | None = None,
    max_new_tokens: int = 64,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    compile: bool = False,
    json: bool = False,
) -> None:
    """Writes text with a trained model: a Hugging Face folder, a run folder or a checkpoint.

    Examples:

      holdfast generate runs/first --prompt "def main("
      holdfast generate my-hf-folder --prompt "Once" "Twice" --temperature 0.8 --top-k 50
      echo "import os" | holdfast generate runs/first --prompt-file - --temperature 0 --json

    Args:
        model: Hugging Face folder, run folder, or checkpoint (step-...) folder.
        prompt: Text to continue; several prompts may be given.
        prompt_file: File with one prompt; - reads standard input.
        max_new_tokens: Tokens to write at most; the end-of-document token ends a text earlier.
        num_return_sequences: Texts per prompt.
        temperature: 0 takes the likeliest token every time.
        top_k: Only the k likeliest tokens are drawn from; 0 for all.
        top_p: Only the likeliest tokens that together reach this probability; 1 for all.
        seed: The same seed gives the same text, whatever is written beside it.
        compile: Compile the layers first; pays off for long or many texts.
        json: One JSON array of objects with prompt, completion, text and tokens, on stdout.
    """
    prompts = list(prompt)
    if prompt_file is not None:
        prompts.append(read_prompt(prompt_file))
    if not prompts:
        raise UsageError('give --prompt "..." or --prompt-file FILE')
    from holdfast.generation.engine import generate

    completions = generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_return_sequences,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        compile=compile,
    )
    if json:
        keys = [
            {"prompt": c.prompt, "completion": c.completion, "text": c.text, "tokens": list(c.tokens)}
            for c in completions
        ]
        print(json_format.dumps(keys, ensure_ascii=False))
        return
    for number, completion in enumerate(completions):
        if number:
            print("---")
        print(completion.text)


def read_prompt(path: Path) -> str:
    """The text of a prompt file; `-` is standard input."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except UnicodeDecodeError as error:
        where = "standard input" if str(path) == "-" else str(path)
        raise UsageError(
            f"{where} is not UTF-8 text (byte {error.start}: {error.reason}); convert it first, "
            "e.g. with iconv -f latin1 -t utf-8"
        ) from None
