"""An ordinary training script, which knows nothing of lucid: AdamW teaches a small net to add.

`lucid profile run --arm off --arm on -- python examples/plain_training.py --anomaly {arm}` measures what autograd's
search for NaNs costs, and whether the training ends with the same bytes.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

MODULUS = 97


def build_net(width: int, depth: int) -> nn.Sequential:
    """Return a net from pairs of numbers `(batch, 2)` to logits `(batch, MODULUS)`."""
    layers: list[nn.Module] = [nn.Embedding(MODULUS, width // 2), nn.Flatten()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, MODULUS))


def main() -> None:
    """Train and print the loss now and then."""
    parser = argparse.ArgumentParser(description="Train a small net to add two numbers.")
    parser.add_argument("--anomaly", choices=("off", "on"), default="off")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(options.anomaly == "on")
    net = build_net(width=32, depth=16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        numbers = torch.randint(MODULUS, (16, 2))
        loss = functional.cross_entropy(net(numbers), numbers.sum(dim=1) % MODULUS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
