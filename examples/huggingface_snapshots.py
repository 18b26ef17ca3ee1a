"""A Hugging Face Trainer with Holdfast's snapshots, by a callback.

    python examples/huggingface_snapshots.py --folder runs/hf

The Trainer owns model, optimizer and scheduler, and calls the callback before and after the optimizer's step. The callback
restores them when training begins and sets the Trainer's step counter; the loader skips the batches that were used.
Creating a loader draws a random number, so with dropout a resumed run is not bit-identical to an uninterrupted one.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.snapshot import Snapshots


class SnapshotCallback(TrainerCallback):
    """Takes a snapshot of a Trainer's model, optimizer and scheduler at every step."""

    def __init__(self, name: str, folder: Path, memory: str = "/dev/shm") -> None:
        self._where: dict[str, Any] = {"name": name, "folder": folder, "memory": memory}
        self._snapshots: Snapshots | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        # accelerate wraps optimizer and scheduler; the wrapped objects have the state
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        scheduler = getattr(objects["lr_scheduler"], "scheduler", objects["lr_scheduler"])
        self._snapshots = Snapshots(
            model=objects["model"], optimizer=optimizer, extra={"scheduler": scheduler}, **self._where
        )
        state.global_step = self._snapshots.restore()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        assert self._snapshots is not None
        self._snapshots.commit()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        assert self._snapshots is not None
        self._snapshots.take(state.global_step)
        if state.global_step >= state.max_steps or self._snapshots.stop_requested():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        assert self._snapshots is not None
        self._snapshots.close()


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of consecutive numbers: easy to learn, no download."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) + index * 7) % 64
        return {"input_ids": tokens, "labels": tokens}


class InOrder(Trainer):
    """Batches in the order of the data, so that the step alone determines the next batch, also after a restore."""

    def get_train_dataloader(self) -> Any:
        done = next((c for c in self.callback_handler.callbacks if isinstance(c, Progress)), Progress())
        rows = range(done.step * 4, 4096)
        data = torch.utils.data.Subset(Numbers(), list(rows))
        return torch.utils.data.DataLoader(data, batch_size=4)


class Progress(TrainerCallback):
    step = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**shape, **quiet, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    trainer_args = TrainingArguments(
        output_dir=str(args.folder / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    events = args.folder / "events.jsonl"
    progress = Progress()
    progress.step = last_step(args.folder, args.memory) if events.exists() else 0
    trainer = InOrder(
        model=model,
        args=trainer_args,
        train_dataset=Numbers(),
        callbacks=[SnapshotCallback("hf", args.folder, args.memory), progress, Die(args.die_at)],
    )
    trainer.train()
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"ended at step {trainer.state.global_step}, weights {total:.17g}", flush=True)


def last_step(folder: Path, memory: str) -> int:
    """Return the step that `restore` will return. The Trainer creates its loader before it calls `on_train_begin`."""
    from holdfast.snapshot.memory.run_memory import RunMemory
    from holdfast.snapshot.report import run_facts

    facts = run_facts(RunMemory.of("hf", folder, memory))
    steps = [*facts["common_steps"], *(entry["step"] for entry in facts["checkpoints"])]
    return max(steps, default=0)


class Die(TrainerCallback):
    """Kills the process after a step, to show a resume."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._step and state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
