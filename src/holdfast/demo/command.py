"""`holdfast demo`."""

import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.demo.stages import DemoRun, Scale

PROMPT = "def main("
RESUMED_KEYS = ("source", "step", "steps_lost", "seconds", "seconds_since_failure")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Run every stage on this machine, offline, in a few minutes on a CPU, and kill a rank during training.

    Examples:

      holdfast demo
      holdfast demo --fast --open
      holdfast demo --workdir /tmp/demo
      holdfast demo --no-keep
    """

    fast: bool = False
    """Less text and fewer steps: 20 to 60 seconds on two cores."""
    keep: bool = True
    """Keep the files."""
    workdir: Path | None = None
    """Folder for the files: new, empty, or from an earlier demo. Unset: ./demo, or a temporary folder with
    --no-keep."""
    open: bool = False
    """Open the run page in the browser of this desktop at the end."""
    json: bool = False
    """Print the measured values and the text as JSON."""


def demo_command(options: DemoOptions) -> None:
    from holdfast.demo import folder, stages
    from holdfast.system.errors import UsageError

    if options.open and not options.keep:
        raise UsageError("--open shows a page that --no-keep removes: leave out one of them")
    work = (options.workdir or Path("demo" if options.keep else tempfile.mkdtemp(prefix="holdfast-demo-"))).resolve()
    folder.claim(work)
    try:
        run_demo(options, work, stages.FAST if options.fast else stages.FULL)
    except KeyboardInterrupt:
        if not options.keep:
            with contextlib.suppress(OSError):  # the keeper of the stopped run may still write there
                folder.remove(work)
        raise
    if not options.keep:
        folder.remove(work)


def run_demo(options: DemoOptions, work: Path, scale: "Scale") -> None:
    """Runs the stages in the folder `work` and prints the result."""
    from holdfast.demo.stages import prepare
    from holdfast.system.desktop import open_in_browser
    from holdfast.system.progress import log

    begin = time.perf_counter()
    log(opening(work, scale, options))
    tokenizer, prefix, counts = prepare(work, scale)
    undisturbed, killed = train_twice(work, tokenizer, prefix, scale)
    text = convert_and_generate(work, killed.folder)
    page = write_page(work, undisturbed.folder, killed.folder, text)
    seconds = time.perf_counter() - begin
    assert killed.resumed is not None
    result = {
        "workdir": str(work) if options.keep else None,
        **counts,
        "validation_loss": [undisturbed.first_loss, undisturbed.last_loss],
        "killed_at": killed.killed_at,
        "resumed": {key: killed.resumed[key] for key in RESUMED_KEYS},
        "bit_identical": True,
        "text": text,
        "page": str(page) if options.keep else None,
        "seconds": seconds,
    }
    print(json.dumps(result) if options.json else text, flush=True)
    log(
        f"\n{counts['bytes'] / 1e6:.1f} MB of text became a model that writes, and survived a kill -9, in {seconds:.0f} s."
    )
    if options.keep:
        log(closing(work, page))
    if options.open:
        open_in_browser(page.as_uri())


def opening(work: Path, scale: "Scale", options: DemoOptions) -> str:
    """What the demo will do, and how long it takes."""
    shorter = "" if options.fast else "; --fast takes 20 to 60 seconds"
    lines = [
        "This demo takes raw text to a model that writes, on this machine and offline.",
        "It trains a small GPT twice with 2 processes (ranks). In the second run it",
        "kills one of them, and then checks that both runs end with the same weights.",
        f"Time: {scale.duration} on two idle CPU cores{shorter}. Ctrl-C stops it.",
        f"Files: {scale.disk} in {work}" if options.keep else f"Files: {scale.disk}, removed at the end",
    ]
    return "\n".join([*lines, ""])


def train_twice(work: Path, tokenizer: Path, prefix: Path, scale: "Scale") -> tuple["DemoRun", "DemoRun"]:
    """Trains undisturbed, then with a kill; returns both runs if they ended with equal state."""
    from holdfast.demo.stages import RANKS, same_weights, train
    from holdfast.system.errors import HoldfastError
    from holdfast.system.progress import count_of, log

    log(f"4. First run: {scale.steps} steps on {RANKS} ranks. After each step, a copy of the state is kept in")
    log("   memory, outside the training processes.")
    undisturbed = train(work, "undisturbed", tokenizer, prefix, scale, kill_at=None)
    losses = f"validation loss {undisturbed.first_loss:.3f} → {undisturbed.last_loss:.3f}"
    log(f"   Done in {undisturbed.seconds:.0f} s: {losses}.")
    log("5. Second run: the same settings, but one rank is killed on the way.")
    killed = train(work, "disturbed", tokenizer, prefix, scale, kill_at=scale.kill_at)
    resumed = killed.resumed
    if resumed is None:
        raise HoldfastError(f"the killed run did not resume; see {work / 'disturbed.log'}")
    # The trainer logs a step shortly before it counts as done: the larger number is what a reader of the log expects.
    lost = max(resumed["steps_lost"], (killed.killed_at or 0) - resumed["step"])
    log(
        f"   The ranks were restarted and resumed from {resumed['source']} at step {resumed['step']}: "
        f"{count_of(lost, 'step')} lost,\n   state restored in {resumed['seconds']:.2f} s, "
        f"next step done {resumed['seconds_since_failure']:.1f} s after the kill."
    )
    if not same_weights(undisturbed.folder, killed.folder):
        raise HoldfastError("the killed run and the uninterrupted one ended with different weights: this is a bug")
    log("   Both runs ended with bit-identical weights and optimizer state.")
    return undisturbed, killed


def convert_and_generate(work: Path, run: Path) -> str:
    from holdfast import convert, generate
    from holdfast.system.progress import log

    model = convert(run, work / "huggingface", to="hf")
    log("6. Convert: the killed run as a Hugging Face folder, which transformers loads.")
    log(f"7. Generate: the model continues {PROMPT!r}. After so few steps, expect the")
    log("   look of Python and no sense.\n")
    text: str = generate(model, PROMPT, max_new_tokens=60, temperature=0.8, top_k=40, seed=7)[0].text
    return text


def write_page(work: Path, undisturbed: Path, killed: Path, text: str) -> Path:
    """The page of both runs, with the generated text."""
    from holdfast.report.page import render
    from holdfast.report.run_record import read_run
    from holdfast.system.atomic_files import publish_text

    sample = [{"prompt": PROMPT, "completion": text.removeprefix(PROMPT)}]
    publish_text(killed / "samples" / "demo.json", json.dumps(sample))
    page = work / "report.html"
    publish_text(page, render([read_run(undisturbed), read_run(killed)]))
    return page


def closing(work: Path, page: Path) -> str:
    """Where the results are, and three commands to try."""
    here = Path(os.path.relpath(work))
    place = shlex.quote(str(work if here.parts[:1] == ("..",) else here))
    program = program_name()
    commands = {
        "more text from the run": f'{program} generate {place}/disturbed --prompt "import os"',
        "a longer run": f"{program} train {place}/undisturbed/config.toml --train-iters 400 --save {place}/longer",
        "the same with your own text": f"{program} init my-model --input your-text.jsonl",
    }
    lines = [
        f"Run page (curves, the failure, the resume): {page}",
        f"Beside it: the dataset, both runs, and huggingface/ in {work}",
        "Try next:",
        *(f"  # {comment}\n  {command}" for comment, command in commands.items()),
    ]
    return "\n".join(lines)


def program_name() -> str:
    """What calls this program in the user's shell: `make demo` runs it from an environment that the shell does not know."""
    script = Path(sys.executable).with_name("holdfast")
    if shutil.which("holdfast") or not script.is_file():
        return "holdfast"
    here = os.path.relpath(script)
    return shlex.quote(str(script) if here.startswith("..") else here)
