"""What a finished run leaves: where the result is, and the commands that come next."""

from pathlib import Path

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.config import Config
from holdfast.system.journal import read_journal


def describe_end(config: Config) -> list[str]:
    """Lines for the user after all ranks have ended without a failure."""
    if config.train.save is None:
        return []
    folder = Path(config.train.save)
    finished = [event for event in read_journal(folder / "events.jsonl") if event["event"] == "finished"]
    if finished and finished[-1].get("stopped"):
        return [f"the same command continues from {folder}"]
    checkpoints = checkpoints_in(folder)
    step = finished[-1]["step"] if finished else None
    if not checkpoints or step not in (None, checkpoints[-1][0]):
        newest = checkpoints[-1][1] if checkpoints else "none"
        return [f"warning: step {step} is not on disk (newest checkpoint: {newest}); see holdfast snapshots {folder}"]
    lines = [f"result: {checkpoints[-1][1]}", "next:"]
    if config.model.model_type == "gpt":
        lines.append(f'  holdfast generate {folder} --prompt "..."')
    lines.append(f"  holdfast convert {folder} {folder}-hf --to hf")
    lines.append(f"  holdfast report {folder}")
    return lines
