"""Real handwritten digits on canvases of their own: a detection data set that needs no download.

The scans come with scikit-learn; the last fifth of them is drawn on validation canvases and nowhere else. A canvas
depends on (size, seed, split, index) alone, so that it can be drawn in any process, at any time.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.seeding import generator_of
from lucid_cli.workloads.detection.values import Targets

MAX_DIGITS = 6
SMALLEST, LARGEST = 0.12, 0.40  # side of a digit as a share of the canvas
SMALLEST_PIXELS = 12  # a digit of fewer cannot be told from another, however small the canvas is
MIN_SIZE = 32
NUM_VALIDATION_SCANS = 360  # of 1797
INK = 0.25  # fainter ink is not drawn, so that a box ends where the eye says
PLACES = 20  # positions that are tried for a digit before it is left out

__all__ = ["Digit", "DigitCanvases", "Split", "load_scans"]

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """One digit on a canvas.

    Attributes:
        scan: Row of the scan in the data set.
        ink: `(height, width)` float32, 0 or `INK` to 1; no outer row or column is empty.
        top: Row of its first row, in pixels.
        left: Column of its first column, in pixels.
    """

    scan: int
    ink: Tensor
    top: int
    left: int

    @property
    def box(self) -> list[int]:
        """The pixels that it covers, `x1 y1 x2 y2`, ends exclusive."""
        height, width = self.ink.shape
        return [self.left, self.top, self.left + width, self.top + height]

    def touches(self, other: "Digit") -> bool:
        """Return whether the boxes overlap."""
        left, top, right, bottom = other.box
        x1, y1, x2, y2 = self.box
        return x1 < right and x2 > left and y1 < bottom and y2 > top


def load_scans() -> tuple[Tensor, Tensor]:
    """Return all scans, `(1797, 8, 8)` float32 with ink from 0 to 1, and their classes, `(1797,)` int64.

    Source: https://archive.ics.uci.edu/dataset/80, as `sklearn.datasets.load_digits` ships it.

    Raises:
        WorkloadError: If scikit-learn, or something that it needs, is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - only digits need it
    except ImportError as error:
        raise WorkloadError(
            f"the digits come with scikit-learn, which cannot be imported ({error}): run `pip install "
            f"{_package_of(error)}`, or give your own data with --images and --annotations"
        ) from error
    digits = load_digits()
    return torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target).long()


def _package_of(error: ImportError) -> str:
    """Return what has to be installed: scikit-learn itself, or what it did not find."""
    module = (error.name or "sklearn").partition(".")[0]
    return "scikit-learn" if module == "sklearn" else module


class DigitCanvases:
    """Square RGB canvases with one to six digits that do not overlap.

    Args:
        num_images: Number of canvases, at least 1.
        size: Side of a canvas in pixels, at least 32; the digits are made for 64 to 640.
        seed: Of everything that is drawn.
        split: Whose scans are used.

    Raises:
        WorkloadError: If a number is too small, or scikit-learn is not installed.
    """

    names = tuple("0123456789")

    def __init__(self, num_images: int, size: int, seed: int, *, split: Split) -> None:
        if num_images < 1 or size < MIN_SIZE:
            raise WorkloadError(
                f"{num_images} canvases of {size} px cannot be drawn: ask for at least 1 of at least {MIN_SIZE} px"
            )
        self.num_images = num_images
        self.size = size
        self.seed = seed
        self.split = split
        self._scans, self._classes = load_scans()
        border = len(self._scans) - NUM_VALIDATION_SCANS
        self._first, self._last = (0, border) if split == "train" else (border, len(self._scans))

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a canvas.

        Returns:
            The image, `(3, size, size)` uint8, and its digits; a box holds the digit's ink and nothing around it.

        Raises:
            IndexError: If there is no such canvas.
        """
        canvas, level = _background(self._generator("background", index), self.size)
        digits = self.digits(index)
        for digit in digits:
            x1, y1, x2, y2 = digit.box
            canvas[:, y1:y2, x1:x2].lerp_(torch.tensor(level), digit.ink)
        return canvas.mul_(255).round_().to(torch.uint8), Targets(
            boxes=torch.tensor([digit.box for digit in digits], dtype=torch.float32),
            classes=self._classes[[digit.scan for digit in digits]],
        )

    def digits(self, index: int) -> list[Digit]:
        """Return the digits of a canvas, at least one; a digit that finds no place is left out.

        Raises:
            IndexError: If there is no such canvas.
        """
        if not 0 <= index < self.num_images:
            raise IndexError(f"there are {self.num_images} canvases, and none has the index {index}")
        generator = self._generator("digits", index)
        placed: list[Digit] = []
        for _ in range(_integer(generator, 1, MAX_DIGITS + 1)):
            scan = _integer(generator, self._first, self._last)
            smallest = max(SMALLEST, SMALLEST_PIXELS / self.size)
            side = round(self.size * _uniform(generator, smallest, LARGEST))
            ink = _enlarge(self._scans[scan], side)
            for _ in range(PLACES):
                top = _integer(generator, 0, self.size - ink.shape[0] + 1)
                left = _integer(generator, 0, self.size - ink.shape[1] + 1)
                digit = Digit(scan=scan, ink=ink, top=top, left=left)
                if not any(digit.touches(other) for other in placed):
                    placed.append(digit)
                    break
        return placed

    def _generator(self, purpose: str, index: int) -> torch.Generator:
        return generator_of("canvas", purpose, self.size, self.seed, self.split, index)


def _enlarge(scan: Tensor, side: int) -> Tensor:
    """Return a scan's ink as it is drawn, without what is too faint and without empty rows and columns around it.

    Args:
        scan: `(8, 8)` float32.
        side: Longest side of a box around a scan that has ink all over.
    """
    # With an empty pixel around the scan its border fades out, and ink reaches up to a quarter of a pixel past it.
    num_pixels = round(side * 10 / 8.5)
    smooth = interpolate(pad(scan, (1, 1, 1, 1))[None, None], size=(num_pixels, num_pixels), mode="bilinear")[0, 0]
    ink = smooth.where(smooth >= INK, 0.0)
    rows, columns = (ink.amax(dim=dim).nonzero() for dim in (1, 0))
    return ink[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]


def _background(generator: torch.Generator, size: int) -> tuple[Tensor, float]:
    """Return a coloured gradient under soft and fine noise, `(3, size, size)` float32, and a grey that stands out.

    A dark ground has every value below 0.5 and a grey above 0.75, a bright one the reverse.
    """
    start, end = torch.empty(2, 3, 1, 1).uniform_(0.05, 0.40, generator=generator)
    angle = _uniform(generator, 0, 2 * math.pi)
    line = torch.linspace(-0.5, 0.5, size) / math.sqrt(2)
    ramp = math.cos(angle) * line[None, :] + math.sin(angle) * line[:, None] + 0.5
    num_spots = _integer(generator, 3, 12)
    spots = torch.rand(1, 1, num_spots, num_spots, generator=generator)
    soft = interpolate(spots, size=(size, size), mode="bilinear")[0, 0]
    fine = torch.rand(size, size, generator=generator)
    ground = torch.lerp(start, end, ramp).add_(soft.sub_(0.5).mul_(0.12).add_(fine.sub_(0.5).mul_(0.06)))
    ground = ground.clamp_(0.0, 0.49)
    level = _uniform(generator, 0.76, 1.0)
    is_dark = _integer(generator, 0, 2) == 0
    return (ground, level) if is_dark else (ground.neg_().add_(1), 1 - level)


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
