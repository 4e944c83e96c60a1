"""One step and one epoch of training, and everything that a checkpoint of it holds."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lucid_cli.workloads.detection.augment import jitter_hsv
from lucid_cli.workloads.detection.ema import Ema
from lucid_cli.workloads.detection.loss import detection_loss
from lucid_cli.workloads.detection.options import Options
from lucid_cli.workloads.detection.schedule import Schedule
from lucid_cli.workloads.detection.values import Batch
from lucid_optim import MuSGD

__all__ = ["Trainer", "autocast", "build_optimizer", "prepare_images", "uses_bfloat16"]


def build_optimizer(model: nn.Module, options: Options) -> MuSGD:
    """Return MuSGD over two groups: matrices, and vectors (biases and norms), which are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return MuSGD(
        [
            {"params": matrices, "weight_decay": options.weight_decay, "role": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "role": "vectors"},
        ],
        lr=options.lr,
        momentum=options.momentum,
    )


class Trainer:
    """A model in training.

    Args:
        model: On its device.
        options: Settings.
        steps_per_epoch: Batches of an epoch.
    """

    def __init__(self, model: nn.Module, options: Options, *, num_classes: int, steps_per_epoch: int) -> None:
        self.model = model
        self.options = options
        self.num_classes = num_classes
        self.device = next(model.parameters()).device
        self.optimizer = build_optimizer(model, options)
        self.ema = Ema(model, decay=options.ema_decay, tau=options.ema_tau)
        self.schedule = Schedule(
            lr=options.lr,
            final=options.final_lr,
            momentum=options.momentum,
            warmup_momentum=options.warmup_momentum,
            warmup_bias_lr=options.warmup_bias_lr,
            warmup_steps=round(options.warmup_epochs * steps_per_epoch),
            total_steps=options.epochs * steps_per_epoch,
        )
        self.num_steps = 0
        self.losses: list[Tensor] = []

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step belongs to the warm-up."""
        return self.num_steps < self.schedule.warmup_steps

    def step(self, batch: Batch, hsv_gains: Tensor | None = None) -> None:
        """Train on one batch.

        Args:
            batch: On the host or the device.
            hsv_gains: `(b, 3)` for colours to be shifted on the device; None leaves them.
        """
        batch = batch.to(self.device, non_blocking=True)
        self.schedule.apply(self.optimizer, self.num_steps)
        images = prepare_images(batch.images, self.options, hsv_gains)
        with autocast(self.options, self.device):
            predictions = self.model(images)
        loss = detection_loss(predictions, batch, num_classes=self.num_classes)
        self.optimizer.zero_grad()
        loss.total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.ema.update(self.model)
        self.num_steps += 1
        self.losses.append(loss.total.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, and the losses so far."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict(),
            "num_steps": self.num_steps,
            "losses": self.all_losses(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, on this trainer's device.

        Raises:
            ValueError: If it is of another model or optimizer; other shapes of data raise what they come to.
        """
        self.model.load_state_dict(state["model"])
        roles = [group["role"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        if [group["role"] for group in self.optimizer.param_groups] != roles:
            raise ValueError(f"the groups of the optimizer must be {roles}")
        for parameter, entry in self.optimizer.state.items():
            shapes = {value.shape for value in entry.values() if isinstance(value, Tensor) and value.ndim > 0}
            if shapes - {parameter.shape}:
                raise ValueError(f"the optimizer's state of a parameter {tuple(parameter.shape)} has other shapes")
        self.ema.load_state_dict(state["ema"])
        self.num_steps = int(state["num_steps"])
        self.losses = list(state["losses"].to(self.device).unbind())
        if len(self.losses) != self.num_steps:
            raise ValueError(f"{self.num_steps} steps have {len(self.losses)} losses")

    def all_losses(self) -> Tensor:
        """Return the loss of every step so far, `(num_steps,)` float32."""
        return torch.stack(self.losses) if self.losses else torch.empty(0)


def autocast(options: Options, device: torch.device) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast where it is asked for and the device has it."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if uses_bfloat16(options, device) else nullcontext()


def uses_bfloat16(options: Options, device: torch.device) -> bool:
    """Return whether the network runs in bfloat16."""
    return options.amp == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()


def prepare_images(images: Tensor, options: Options, hsv_gains: Tensor | None = None) -> Tensor:
    """Return uint8 images `(b, 3, h, w)` as float32 in [0, 1], in the memory format that is trained in."""
    floats = images.float().div(255)
    if hsv_gains is not None:
        floats = jitter_hsv(floats, hsv_gains.to(floats.device, non_blocking=True))
    return floats.contiguous(memory_format=torch.channels_last) if options.channels_last else floats
