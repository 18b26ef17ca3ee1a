"""`holdfast generate MODEL`."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from holdfast.command_line.flags import positional
from holdfast.config import TokenizerType
from holdfast.system.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Write text with a trained model: a Hugging Face folder, a run folder or a checkpoint.

    Examples:

      holdfast generate runs/first --prompt "def main("
      holdfast generate first-hf --prompt "Once" "Twice" --temperature 0.8 --top-k 50
      echo "import os" | holdfast generate runs/first --prompt-file - --temperature 0 --json
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "prompt": "input and output",
        "temperature": "sampling",
        "vocab_file": "tokenizer",
        "compile": "speed",
    }

    model: str = field(metadata=positional())
    """Hugging Face folder, run folder, checkpoint (step-...) folder, or Megatron checkpoint."""
    prompt: tuple[str, ...] = ()
    """Text to continue; several prompts may be given."""
    prompt_file: Path | None = None
    """File with one prompt; - reads standard input."""
    max_new_tokens: int = 64
    """Longest continuation, in tokens; the end-of-document token ends a text earlier."""
    num_return_sequences: int = 1
    """Texts per prompt."""
    json: bool = False
    """Print one JSON array of objects with prompt, completion, text and tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability; 1 draws from all."""
    seed: int = 1234
    """The same seed gives the same text, whatever else is in the batch."""
    vocab_file: str | None = None
    """vocab.json of the model's tokenizer, for a model that names none (Megatron's), or a catalog name such as gpt2."""
    merge_file: str | None = None
    """merges.txt of the tokenizer."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, a SentencePiece model or a tiktoken file, instead of the two above."""
    tokenizer_type: TokenizerType | None = None
    """Kind of the tokenizer. Unset: that of the model, or what its files show."""
    compile: bool = False
    """Compile the layers first; saves time for long or many texts."""


def generate_command(options: GenerateOptions) -> None:
    prompt_file = options.prompt_file
    prompts = list(options.prompt)
    if prompt_file is not None:
        prompts.append(read_prompt(prompt_file))
    if not prompts:
        raise UsageError('give --prompt "..." or --prompt-file FILE')
    from holdfast.generation.engine import generate
    from holdfast.tokenizers.folder import KEYS

    completions = generate(
        options.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        num_return_sequences=options.num_return_sequences,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        compile=options.compile,
        tokenizer={key: getattr(options, key) for key in KEYS},
    )
    if options.json:
        keys = [
            {"prompt": c.prompt, "completion": c.completion, "text": c.text, "tokens": list(c.tokens)}
            for c in completions
        ]
        print(json.dumps(keys, ensure_ascii=False))
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
