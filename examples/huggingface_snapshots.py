"""A Hugging Face Trainer with Holdfast's snapshots: a callback, nothing else changes.

    python examples/huggingface_snapshots.py --folder runs/hf

The Trainer calls back before and after the optimizer's step; model, optimizer and scheduler are its own. The callback
restores them when training begins and sets the Trainer's step counter; the loader leaves out the batches that were used.
Making a loader draws a random number, so with dropout a resumed run is not equal to the undisturbed one to the bit.
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
    """Keeps a Trainer's model, optimizer and scheduler in memory at every step."""

    def __init__(self, name: str, folder: Path, memory: str = "/dev/shm") -> None:
        self._where: dict[str, Any] = {"name": name, "folder": folder, "memory": memory}
        self._snapshots: Snapshots | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        # accelerate wraps optimizer and scheduler; what they wrap is what has state
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
    """Sequences that count upwards from anywhere: easy to learn, nothing to download."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) + index * 7) % 64
        return {"input_ids": tokens, "labels": tokens}


class InOrder(Trainer):
    """Batches in the order of the data, so that the step alone says which batch comes next, also after a restore."""

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
    """The step that a restore will come back to: the loader is made before the Trainer says that training begins."""
    from holdfast.snapshot.memory.run_memory import RunMemory
    from holdfast.snapshot.report import run_facts

    facts = run_facts(RunMemory.of("hf", folder, memory))
    steps = [*facts["common_steps"], *(entry["step"] for entry in facts["checkpoints"])]
    return max(steps, default=0)


class Die(TrainerCallback):
    """Shows what a crash costs."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._step and state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
