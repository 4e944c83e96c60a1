"""Data-parallel training of a small net; torchrun starts the ranks, and lucid measures them all as one run.

`lucid profile run --pairs 2 -- torchrun --nproc-per-node 2 examples/two_ranks.py` runs on processors: the ranks
exchange their gradients through gloo. With `--device cuda` each has a GPU of its own, and they use NCCL.
"""

import argparse
import os

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lucid_optim import MuSGD


def main() -> None:
    """Train on this rank's share of the data and print its loss now and then."""
    parser = argparse.ArgumentParser(description="Train a small net on several ranks.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()

    torch.set_num_threads(1)
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)  # the same net on each rank
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(options.device)
    model = DistributedDataParallel(net)
    optimizer = MuSGD(net.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1 + rank)  # other data on each rank
    for step in range(1, options.steps + 1):
        inputs = torch.randn(64, 32, generator=generator).to(options.device)
        loss = functional.cross_entropy(model(inputs), (inputs.sum(dim=1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"rank {rank}, step {step}: loss {loss.item():.3f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
