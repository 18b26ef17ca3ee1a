"""A user's own script, run by plain torchrun: DDP, a loader with worker processes, a rank that kills itself once."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from holdfast.snapshot import Snapshots
from holdfast.system.journal import Journal

folder, memory, steps, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


class Numbers(Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    trace = Journal(folder / "trace.jsonl")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = Snapshots("script", model=model, optimizer=optimizer, folder=folder, memory=memory)
    step = snapshots.restore()
    first = step * world + rank
    loader = DataLoader(Numbers(), sampler=range(first, 1 << 20, world), num_workers=1)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        snapshots.commit()
        optimizer.step()
        step += 1
        snapshots.take(step)
        trace.event("step", rank=rank, step=step)
        if step == kill_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == steps or snapshots.stop_requested():
            break
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    trace.event("ended", rank=rank, step=step, hash=content.hex())
    snapshots.close()
    dist.destroy_process_group()
    # At once: freed after its group, DDP waits for gloo's thread with the interpreter's lock, which that may need.
    os._exit(0)


if __name__ == "__main__":
    main()
