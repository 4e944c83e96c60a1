"""Train a small convolutional net on the handwritten digits that scikit-learn ships.

Plain PyTorch: nothing here knows of lucid but the optimizer's import and the three calls of `lucid_profiler`, which do
nothing outside `lucid profile run`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import lucid_profiler
from lucid_optim import MuSGD


def build_net() -> nn.Module:
    """Return a net from `(batch, 1, 8, 8)` scans to `(batch, 10)` logits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
        nn.Conv2d(32, 64, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load_scans(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 1,797 scans `(n, 1, 8, 8)` in [0, 1] and their labels `(n,)`, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return images[order].to(device), torch.from_numpy(digits.target)[order].to(device)


def evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of scans whose digit the net names."""
    net.eval()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).double().mean()
    net.train()
    return float(accuracy)


def main() -> None:
    """Train, print the accuracy of each epoch, and hand the results to lucid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the net is too small to share, and another number would add in another order
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    device = torch.device(options.device)
    images, labels = load_scans(device)
    train_images, train_labels, test_images, test_labels = images[:1500], labels[:1500], images[1500:], labels[1500:]
    net = build_net().to(device)
    optimizer = MuSGD(net.parameters(), lr=options.lr)
    steps = options.epochs * (len(train_images) // options.batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.lr, total_steps=steps, pct_start=0.2)
    shuffle = torch.Generator().manual_seed(options.seed)
    losses = []
    accuracies = []

    with lucid_profiler.fit():
        for epoch in range(options.epochs):
            lucid_profiler.mark("train")
            order = torch.randperm(len(train_images), generator=shuffle).to(device)
            for batch in order.split(options.batch):
                if len(batch) < options.batch:
                    continue
                loss = functional.cross_entropy(net(train_images[batch]), train_labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.detach())
            lucid_profiler.mark("validate")
            accuracies.append(evaluate(net, test_images, test_labels))
            print(f"epoch {epoch + 1}: accuracy {accuracies[-1]:.1%}", flush=True)

    lucid_profiler.state("model", net.state_dict())
    lucid_profiler.state("optimizer", optimizer.state_dict())
    lucid_profiler.state("scheduler", scheduler.state_dict())
    lucid_profiler.state("losses", torch.stack(losses))
    lucid_profiler.state("metrics", {"accuracy": accuracies})


if __name__ == "__main__":
    main()
