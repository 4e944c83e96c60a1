"""Warm-up and decay against values worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lucid_cli.workloads.detection.schedule import Schedule
from lucid_optim import MuSGD

SCHEDULE = Schedule(
    lr=0.1,
    final=0.1,
    momentum=0.9,
    warmup_momentum=0.5,
    warmup_bias_lr=0.3,
    warmup_steps=4,
    total_steps=11,
)


def test_matrices_rise_from_zero_and_vectors_fall_to_the_same_value() -> None:
    """Half way through the warm-up both are half way between their start and the decayed value."""
    decayed = 0.1 * (0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
    assert SCHEDULE.at(0, "matrices").lr == 0.0
    assert SCHEDULE.at(0, "vectors").lr == 0.3
    assert SCHEDULE.at(2, "matrices").lr == pytest.approx(decayed / 2)
    assert SCHEDULE.at(2, "vectors").lr == pytest.approx((0.3 + decayed) / 2)
    assert SCHEDULE.at(4, "matrices") == SCHEDULE.at(4, "vectors")


def test_momentum_warms_up_for_both() -> None:
    """Momentum goes from its first value to its last in equal steps and stays there."""
    assert [SCHEDULE.at(step, "vectors").momentum for step in range(6)] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 0.9])


def test_the_last_step_has_the_final_share() -> None:
    """The cosine ends at `lr * final` and stays there."""
    assert SCHEDULE.decayed_lr(0) == 0.1
    assert SCHEDULE.decayed_lr(10) == pytest.approx(0.01)
    assert SCHEDULE.decayed_lr(25) == pytest.approx(0.01)


def test_no_warm_up_starts_at_the_full_rate() -> None:
    """A warm-up of zero steps divides by nothing."""
    plain = Schedule(
        lr=0.1, final=1.0, momentum=0.9, warmup_momentum=0.5, warmup_bias_lr=0.3, warmup_steps=0, total_steps=1
    )
    assert plain.at(0, "vectors").lr == 0.1
    assert plain.at(0, "vectors").momentum == 0.9


def test_it_writes_every_group_by_its_role() -> None:
    """Lr and momentum of each group are the step's; nothing else changes."""
    groups: list[dict[str, Any]] = [
        {"params": [Parameter(torch.ones(2, 2))], "role": "matrices"},
        {"params": [Parameter(torch.ones(2))], "role": "vectors", "weight_decay": 0.0},
    ]
    optimizer = MuSGD(groups, lr=1.0)
    SCHEDULE.apply(optimizer, 1)
    matrices, vectors = optimizer.param_groups
    assert (matrices["lr"], matrices["momentum"]) == (SCHEDULE.at(1, "matrices").lr, pytest.approx(0.6))
    assert (vectors["lr"], vectors["weight_decay"]) == (SCHEDULE.at(1, "vectors").lr, 0.0)
