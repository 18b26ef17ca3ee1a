"""`holdfast generate MODEL`: its flags, its prompts, and the choice between generating text and filling masks."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from holdfast.command_line.flags import positional
from holdfast.system.errors import UsageError
from holdfast.system.progress import log
from holdfast.tokenizers.options import TokenizerOptions


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TokenizerOptions):
    """Generate text with a trained model: a run, a checkpoint, a Hugging Face folder, a Megatron checkpoint.

    Without a prompt a text starts from the end-of-document token. BERT models fill masks instead (--fill-mask).

    Examples:

      holdfast generate runs/first --prompt "def main("
      holdfast generate first-hf --prompt "Once" "Twice" --temperature 0.8 --top-k 50
      echo "import os" | holdfast generate runs/first --prompt-file - --temperature 0 --json
      holdfast generate runs/first --interactive --stop "\\n\\n"
      holdfast generate runs/bert --fill-mask "The capital of France is [MASK]."
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "prompt": "input and output",
        "temperature": "sampling",
        "vocab_file": "tokenizer",
        "speculate": "speed",
    }

    model: str = field(metadata=positional())
    """Run folder (its newest state, also while it trains), checkpoint (step-...) folder, Hugging Face folder, or Megatron
    checkpoint."""
    prompt: tuple[str, ...] = ()
    """Text to continue; several prompts may be given."""
    prompt_file: tuple[Path, ...] = ()
    """File with one prompt; - reads standard input. Several may be given."""
    interactive: bool = False
    """Read prompts line by line, and continue each; Ctrl-C ends a text, Ctrl-D the program."""
    fill_mask: tuple[str, ...] = ()
    """Text with one or more [MASK], for a BERT model: print the likeliest tokens for each (5, or --top-k) and their
    probabilities."""
    max_new_tokens: int = 64
    """Longest continuation, in tokens; the end-of-document token ends a text earlier."""
    num_return_sequences: int = 1
    """Texts per prompt."""
    stop: tuple[str, ...] = ()
    """End a text before the first of these strings; \\n and \\t stand for line break and tab."""
    sliding_window: bool = False
    """Continue beyond the model's positions, with the newest half of them as context. Unset: the text ends there."""
    logprobs: int | None = None
    """With --json: report the log-probability of each token, and of this many likeliest tokens."""
    json: bool = False
    """Print one JSON array of objects with prompt, completion, text, tokens, finish_reason, tokens_per_s and
    time_to_first_token_s. Unset: print the texts as they are generated."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together reach this probability; 1: from all."""
    min_p: float = 0.0
    """Leave out tokens whose probability is below this fraction of the likeliest token's."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the text less likely (above 1) or more likely (below 1)."""
    seed: int = 1234
    """The same seed gives the same text, whatever else is in the batch."""
    speculate: str | None = None
    """Speculative decoding: guess several tokens and check them in one pass; the text stays the same. ngram guesses what
    followed the newest tokens earlier in the text; a path is a smaller draft model with the same tokenizer. Faster for large
    models and small batches."""
    compile: bool = False
    """Compile the layers first; faster for long or many texts. The fused kernels on CUDA need no compilation."""
    weights: Literal["int8", "fp8"] | None = None
    """On CUDA: decode with 8-bit copies of the matrices; faster for large models, slightly less accurate."""


def generate_command(options: GenerateOptions) -> None:
    for text in (*options.prompt, *options.fill_mask, *options.stop):
        check_utf8(text)
    if options.fill_mask:
        return _fill_mask_command(options)
    given = bool(options.prompt or options.prompt_file)
    if options.interactive and (given or options.json):
        raise UsageError(
            "--interactive reads its prompts from standard input: leave out --prompt, --prompt-file, --json"
        )
    if options.logprobs is not None and not options.json:
        raise UsageError("--logprobs is part of the JSON output: add --json")
    prompts = [*options.prompt, *map(read_prompt, options.prompt_file)] if given else [""]
    log(f"loading {options.model}")  # before torch, whose import takes a second or more
    from holdfast.generation.printing import generate_and_print

    generate_and_print(options, prompts)


def _fill_mask_command(options: GenerateOptions) -> None:
    if options.prompt or options.prompt_file or options.interactive:
        raise UsageError("--fill-mask takes its own texts: leave out --prompt, --prompt-file and --interactive")
    from holdfast.command_line.results import print_json
    from holdfast.generation.masked import fill_mask

    names = options.tokenizer_names()
    found = fill_mask(options.model, options.fill_mask, top_k=options.top_k or 5, tokenizer=names)
    if options.json:
        return print_json(
            [{"prompt": text, "masks": masks} for text, masks in zip(options.fill_mask, found, strict=True)]
        )
    for text, masks in zip(options.fill_mask, found, strict=True):
        print(text)
        for number, predictions in enumerate(masks, 1):
            if len(masks) > 1:
                print(f"mask {number}")
            for prediction in predictions:
                print(f"  {prediction.probability:.4f}  {prediction.token}")


def check_utf8(text: str) -> None:
    """Refuses bytes that are not UTF-8; arguments of the command line, and standard input in some locales, may hold any."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 1]
        raise UsageError(f"{near!r} is not UTF-8 text (character {error.start})") from None


def read_prompt(path: Path) -> str:
    """The text of a prompt file; `-` is standard input."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except UnicodeDecodeError as error:
        where = "standard input" if str(path) == "-" else str(path)
        raise UsageError(
            f"{where} is not UTF-8 text (byte {error.start}: {error.reason}); convert it first, "
            "e.g. with iconv -f latin1 -t utf-8"
        ) from None
    check_utf8(text)
    return text
