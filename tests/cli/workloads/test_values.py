"""The values that travel between data, network, loss and metric."""

import subprocess
import sys

import pytest
import torch

from lucid_cli.workloads.detection.values import Batch
from support.reference import pickled


def batch_of_three() -> Batch:
    """Return three images with two, no and one objects."""
    return Batch(
        images=torch.zeros(3, 3, 32, 32, dtype=torch.uint8),
        boxes=torch.arange(12.0).view(3, 4),
        classes=torch.tensor([4, 5, 6]),
        image_index=torch.tensor([0, 0, 2]),
    )


def test_a_batch_gives_back_the_objects_of_each_image() -> None:
    """Objects come back by image, in order, and an image without objects has empty tensors of the right shape."""
    first, second, third = batch_of_three().targets()
    assert first.classes.tolist() == [4, 5]
    assert third.boxes.tolist() == [[8.0, 9.0, 10.0, 11.0]]
    assert second.boxes.shape == (0, 4)
    assert second.classes.shape == (0,)


def test_a_batch_moves_between_devices_and_processes() -> None:
    """Moving where it is shares memory, meta loses the values alone, and a pickle travels whole."""
    batch = batch_of_three()
    assert batch.to("cpu").images.data_ptr() == batch.images.data_ptr()
    meta = batch.to("meta", non_blocking=True)
    assert {meta.images.device.type, meta.boxes.device.type, meta.classes.device.type} == {"meta"}
    assert meta.image_index.shape == (3,)
    assert torch.equal(pickled(batch).boxes, batch.boxes)


@pytest.mark.gpu
def test_a_pinned_batch_is_page_locked() -> None:
    """Each tensor of a pinned batch is in page-locked memory."""
    pinned = batch_of_three().pin_memory()
    assert all(t.is_pinned() for t in (pinned.images, pinned.boxes, pinned.classes, pinned.image_index))


def test_the_package_imports_without_torch() -> None:
    """Importing the package alone costs no import of torch."""
    code = "import sys, lucid_cli.workloads.detection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
