"""Checks of `--eval-samples`, and the prompts of `--eval-prompts`."""

from pathlib import Path

from holdfast.config import Config
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import Tokenizer


def check_eval_samples(config: Config, tokenizer: Tokenizer | None) -> None:
    """Refuses a run that could not generate samples, before any rank starts. Not if the run asks for none."""
    train = config.train
    if not train.eval_samples:
        if train.eval_prompts:
            raise UsageError("--eval-prompts needs --eval-samples, the number of samples per evaluation")
        return
    if config.model.model_type != "gpt":
        raise UsageError("--eval-samples: a BERT model does not generate text; leave it out")
    if not train.save:
        raise UsageError("--eval-samples writes samples.jsonl into the run folder: give --save DIR")
    if not (train.eval_interval and train.eval_iters):
        raise UsageError("--eval-samples are part of an evaluation: give --eval-interval and --eval-iters above 0")
    if tokenizer is None:
        raise HoldfastError(
            "--eval-samples needs the run's tokenizer: give vocab_file and merge_file, or tokenizer_model"
        )
    if train.eval_prompts:
        positions = config.model.max_position_embeddings or config.data.seq_length
        for number, prompt in enumerate(read_prompts(train.eval_prompts), 1):
            if (tokens := len(tokenizer.encode(prompt))) >= positions:
                raise HoldfastError(
                    f"{train.eval_prompts}: prompt {number} has {tokens} tokens, but the model has {positions} positions; "
                    "shorten it"
                )


def read_prompts(path: str) -> list[str]:
    """The prompts of a file: its lines that are not blank."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise HoldfastError(f"--eval-prompts {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HoldfastError(f"--eval-prompts {path} is not UTF-8 text (byte {error.start})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise HoldfastError(f"--eval-prompts {path} has no prompts; write one per line")
    return prompts
