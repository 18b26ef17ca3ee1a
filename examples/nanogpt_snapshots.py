"""A complete nanoGPT-style training script with Holdfast's snapshots. The four lines marked with <- are Holdfast's.

    python examples/nanogpt_snapshots.py --text some.txt --folder runs/nano
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/nanogpt_snapshots.py --text some.txt --folder runs/nano

Kill a rank with `kill -9` while it trains: torchrun restarts the ranks, and they continue from the same state, to the bit.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.snapshot import Snapshots


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch_of(data: Tensor, step: int, rank: int, batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the batch of a step. It depends on step and rank only, so a loader has no state to restore."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
    rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    distributed = "RANK" in os.environ
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if distributed:
        dist.init_process_group()
    rank = dist.get_rank() if distributed else 0
    data = torch.tensor(list(args.text.read_bytes()), dtype=torch.long)
    torch.manual_seed(1337)
    model: nn.Module = GPT(256, args.width, layers=2, heads=4, length=32).to(device)
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    torch.manual_seed(42 + rank)  # dropout differs from rank to rank

    extra = {"scheduler": scheduler}
    snapshots = Snapshots("nano", model, optimizer, extra, args.folder, memory=args.memory)  # <-
    step = snapshots.restore()  # <- 0 on a fresh start
    while step < args.steps:
        loss = model(*batch_of(data, step, rank, batch=8, length=32, device=device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        snapshots.commit()  # <- waits until the last snapshot is complete
        optimizer.step()
        scheduler.step()
        step += 1
        snapshots.take(step)  # <- returns at once; copies while the next step computes
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step % 100 == 0:
            snapshots.save(step)  # writes the snapshot to disk while training continues
        if snapshots.stop_requested():  # SIGTERM, SIGUSR1, `holdfast persist --stop`, the file `persist`
            break
    weights = torch.cat([parameter.detach().flatten().double().cpu() for parameter in model.parameters()])
    if rank == 0:
        print(
            f"ended at step {step}, weights {weights.sum().item():.17g} {weights.square().sum().item():.17g}",
            flush=True,
        )
    snapshots.close()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
