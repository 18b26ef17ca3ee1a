"""`holdfast demo`."""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROMPT = "def main("


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Run every stage on this machine, offline, in a few minutes on a CPU, and kill a rank during training.

    Examples:

      holdfast demo
      holdfast demo --workdir /tmp/demo
      holdfast demo --no-keep
    """

    keep: bool = True
    """Keep the files."""
    workdir: Path | None = None
    """Folder for the files: new, empty, or from an earlier demo. Unset: ./demo, or a temporary folder with
    --no-keep."""
    json: bool = False
    """Print the measured values and the text as JSON."""


def demo_command(options: DemoOptions) -> None:
    from holdfast import convert, generate
    from holdfast.demo import folder
    from holdfast.demo.stages import KILL_AT, STEPS, prepare, same_weights, train
    from holdfast.system.errors import HoldfastError
    from holdfast.system.progress import count_of, log

    begin = time.perf_counter()
    work = (options.workdir or Path("demo" if options.keep else tempfile.mkdtemp(prefix="holdfast-demo-"))).resolve()
    folder.claim(work)
    tokenizer, prefix, counts = prepare(work)

    undisturbed = train(work, "undisturbed", tokenizer, prefix, kill_at=None)
    log(f"4. training     {STEPS} steps on 2 ranks in {undisturbed.seconds:.0f} s")
    log(f"                validation loss {undisturbed.first_loss:.3f} → {undisturbed.last_loss:.3f}")
    killed = train(work, "disturbed", tokenizer, prefix, kill_at=KILL_AT)
    resumed = killed.resumed
    if resumed is None:
        raise HoldfastError(f"the killed run did not resume; see {work / 'disturbed.log'}")
    log(
        f"5. the same, with a rank killed at step {killed.killed_at}: resumed from {resumed['source']} at step "
        f"{resumed['step']}, {count_of(resumed['steps_lost'], 'step')} lost, state restored in {resumed['seconds']:.2f} s"
    )
    if not same_weights(undisturbed.folder, killed.folder):
        raise HoldfastError("the killed run and the uninterrupted one ended with different weights: this is a bug")
    log("                final weights and optimizer state: bit-identical to the uninterrupted run")

    model = convert(killed.folder, work / "huggingface", to="hf")
    log("6. convert      a Hugging Face folder that transformers loads unchanged")
    text = generate(model, PROMPT, max_new_tokens=60, temperature=0.8, top_k=40, seed=7)[0].text
    log("7. generate     " + repr(PROMPT))
    seconds = time.perf_counter() - begin
    result = {
        "workdir": str(work) if options.keep else None,
        **counts,
        "validation_loss": [undisturbed.first_loss, undisturbed.last_loss],
        "killed_at": killed.killed_at,
        "resumed": {key: resumed[key] for key in ("source", "step", "steps_lost", "seconds")},
        "bit_identical": True,
        "text": text,
        "seconds": seconds,
    }
    print(json.dumps(result) if options.json else text)
    log(summary(work, counts, seconds, options.keep))
    if not options.keep:
        folder.remove(work)


def summary(work: Path, counts: dict[str, int], seconds: float, keep: bool) -> str:
    lines = [
        "",
        f"{counts['bytes'] / 1e6:.1f} MB of text → {counts['tokens']:,} tokens → a GPT that survived a kill -9 → text, "
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
