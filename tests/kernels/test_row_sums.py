"""The kernel's row sums are those of numpy, for whole rows, last rows and tensors that are not aligned."""

import numpy as np
import torch


def test_row_sums_of_many_tensors(device):
    from holdfast.kernels.row_sums import ROW, RowSums

    sizes = [3, 4, ROW, ROW + 1, 4 * ROW, 9 * ROW + 13, 0, 5]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for size in sizes]
    tensors.append(tensors[5][1:])
    counts = [-(-len(tensor) // ROW) for tensor in tensors]
    starts = [2 + sum(counts[:index]) for index in range(len(counts))]
    sums = torch.full((2 + sum(counts),), -1, dtype=torch.int64, device=device)
    RowSums(tensors, starts).into(sums)
    expected = [-1, -1]
    for tensor, rows in zip(tensors, counts, strict=True):
        padded = np.zeros(rows * ROW, dtype=np.uint8)
        padded[: len(tensor)] = tensor.cpu().numpy()
        expected += padded.view(np.int64).reshape(rows, ROW // 8).sum(axis=1).tolist()
    assert sums.tolist() == expected
