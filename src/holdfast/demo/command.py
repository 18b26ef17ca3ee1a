"""`holdfast demo`."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.demo.path import Training

PROMPT = "def main("


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The whole path on this machine, offline, in a few minutes on a CPU, with a rank killed on the way.

    Examples:

      holdfast demo
      holdfast demo --workdir /tmp/demo
      holdfast demo --no-keep
    """

    keep: bool = True
    """Leave the files for you to look at."""
    workdir: Path | None = None
    """Folder for the files: one that is new, empty, or from an earlier demo. Unset: ./demo, or a temporary folder with
    --no-keep."""
    json: bool = False
    """Print the measured values and the text as JSON."""


def demo_command(options: DemoOptions) -> None:
    from holdfast.demo import folder as own_folder
    from holdfast.demo.path import KILL_AT, STEPS, prepare, same_weights, train
    from holdfast.system.errors import HoldfastError
    from holdfast.system.progress import count_of, log

    begin = time.perf_counter()
    keep, workdir = options.keep, options.workdir
    work = (workdir or (Path("demo") if keep else Path(tempfile.mkdtemp(prefix="holdfast-demo-")))).resolve()
    own_folder.claim(work)
    tokenizer, prefix, numbers = prepare(work)

    calm = train(work, "undisturbed", tokenizer, prefix, kill_at=None)
    log(f"4. training     {STEPS} steps on 2 ranks in {calm.seconds:.0f} s")
    log(f"                validation loss {calm.first_loss:.3f} → {calm.last_loss:.3f}")
    torn = train(work, "disturbed", tokenizer, prefix, kill_at=KILL_AT)
    if torn.resumed is None:
        raise HoldfastError(f"the killed run did not resume; see {work / 'disturbed.log'}")
    identical = same_weights(calm.folder, torn.folder)
    log(
        f"5. the same, with a rank killed at step {torn.killed_at}: resumed from {torn.resumed['source']} at step "
        f"{torn.resumed['step']}, {count_of(torn.resumed['steps_lost'], 'step')} lost, state restored in "
        f"{torn.resumed['seconds']:.2f} s"
    )
    if not identical:
        raise HoldfastError("the killed run and the undisturbed one ended with different weights: that is a bug")
    log("                final weights and optimizer state: bit-identical to the undisturbed run")

    from holdfast import convert, generate

    folder = convert(torn.folder, work / "huggingface", to="hf")
    log("6. convert      a Hugging Face folder that transformers loads as it is")
    text = generate(folder, PROMPT, max_new_tokens=60, temperature=0.8, top_k=40, seed=7)[0].text
    log("7. generate     " + repr(PROMPT))
    seconds = time.perf_counter() - begin
    print(_as_json(work, keep, numbers, calm, torn, text, seconds) if options.json else text)
    log(summary(work, numbers, seconds, keep))
    if not keep:
        own_folder.remove(work)


def _as_json(
    work: Path, keep: bool, numbers: dict[str, int], calm: "Training", torn: "Training", text: str, seconds: float
) -> str:
    import orjson

    assert torn.resumed is not None
    result = {
        "workdir": str(work) if keep else None,
        **numbers,
        "validation_loss": [calm.first_loss, calm.last_loss],
        "killed_at": torn.killed_at,
        "resumed": {key: torn.resumed[key] for key in ("source", "step", "steps_lost", "seconds")},
        "bit_identical": True,
        "text": text,
        "seconds": seconds,
    }
    return orjson.dumps(result).decode()


def summary(work: Path, numbers: dict[str, int], seconds: float, keep: bool) -> str:
    lines = [
        "",
        f"{numbers['bytes'] / 1e6:.1f} MB of text → {numbers['tokens']:,} tokens → a GPT that survived a kill -9 → text, "
        f"in {seconds:.0f} s",
    ]
    if keep:
        lines += [
            f"everything is in {work}:",
            "  stdlib_text_document.bin/.idx   the dataset, in Megatron's format",
            "  undisturbed/, disturbed/        the two runs: config.toml, metrics.jsonl, events.jsonl, checkpoints/",
            "  huggingface/                    for AutoModelForCausalLM.from_pretrained",
            "what to try next:",
            f'  holdfast generate {work}/disturbed --prompt "import os" --temperature 0.7',
            f"  holdfast train {work}/undisturbed/config.toml --train-iters 400 --save {work}/longer",
            f"  holdfast convert {work}/disturbed {work}/megatron --to megatron --tensor-model-parallel-size 2",
        ]
    return "\n".join(lines)
