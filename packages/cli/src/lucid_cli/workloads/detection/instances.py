"""Parses a COCO instances file, and says which entry of it is not as the format asks."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucid_cli.workloads.detection.errors import WorkloadError

__all__ = ["AnnotationEntry", "ImageEntry", "InstancesFile"]

_FORMAT = "write the file in COCO's instances format, https://cocodataset.org/#format-data"
_LARGEST_SIDE = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """An entry of `images`."""

    id: int
    file_name: str
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationEntry:
    """An entry of `annotations`; the box is `x y width height`."""

    image_id: int
    category_id: int
    box: tuple[float, float, float, float]
    is_crowd: bool


class InstancesFile:
    """A parsed annotations file, every entry checked.

    Attributes:
        path: Where it was read.
        names: Of the categories, by id.
        images: By file name.
        annotations: Of each image, by the image's id, in the file's order.
        num_unlisted: Annotations whose image is not listed; they are left out.

    Args:
        path: The JSON file.

    Raises:
        WorkloadError: If it cannot be read, or something is not as the format says; the message names the entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lists = _read_lists(path)
        self.names = self._read_names()
        self.images = self._read_images()
        self.annotations: dict[int, list[AnnotationEntry]] = {image.id: [] for image in self.images}
        self.num_unlisted = 0
        self._read_annotations()

    def _read_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for where, entry in self._entries("categories"):
            category_id = self._field(entry, where, "id", int)
            self._once(category_id in names, where, f"id {category_id}")
            names[category_id] = self._field(entry, where, "name", str)
        if not names:
            raise WorkloadError(f"{self.path} has no categories, so there is nothing to detect: {_FORMAT}")
        return names

    def _read_images(self) -> list[ImageEntry]:
        images: dict[int, ImageEntry] = {}
        paths: set[Path] = set()
        for where, entry in self._entries("images"):
            image = ImageEntry(
                id=self._field(entry, where, "id", int),
                file_name=self._field(entry, where, "file_name", str),
                width=self._field(entry, where, "width", int),
                height=self._field(entry, where, "height", int),
            )
            if not image.file_name or not all(1 <= side <= _LARGEST_SIDE for side in (image.width, image.height)):
                raise self._wrong(where, "has no usable file name, width or height")
            self._once(image.id in images, where, f"id {image.id}")
            self._once(Path(image.file_name) in paths, where, f"file name {image.file_name!r}")
            images[image.id] = image
            paths.add(Path(image.file_name))
        return sorted(images.values(), key=lambda image: image.file_name)

    def _read_annotations(self) -> None:
        ids: set[int] = set()
        for where, entry in self._entries("annotations"):
            annotation = self._annotation(entry, where)
            if "id" in entry:
                annotation_id = self._field(entry, where, "id", int)
                self._once(annotation_id in ids, where, f"id {annotation_id}")
                ids.add(annotation_id)
            if annotation.image_id in self.annotations:
                self.annotations[annotation.image_id].append(annotation)
            else:
                self.num_unlisted += 1

    def _annotation(self, entry: dict[str, Any], where: str) -> AnnotationEntry:
        category_id = self._field(entry, where, "category_id", int)
        if category_id not in self.names:
            raise self._wrong(where, f"has the category {category_id}, which is not listed")
        box = self._field(entry, where, "bbox", list)
        if len(box) != 4 or not all(type(number) in {int, float} for number in box):
            raise self._wrong(where, f"has the bbox {box!r:.80}, which is not four numbers x, y, width, height")
        x, y, width, height = map(_to_float, box)
        return AnnotationEntry(
            image_id=self._field(entry, where, "image_id", int),
            category_id=category_id,
            box=(x, y, width, height),
            is_crowd=bool(entry.get("iscrowd", 0)),
        )

    def _entries(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what an entry is called in messages, and the entry."""
        for row, entry in enumerate(self._lists[key]):
            where = f"{key}[{row}]"
            if not isinstance(entry, dict):
                raise self._wrong(where, "is no object")
            yield where, entry

    def _field(self, entry: dict[str, Any], where: str, name: str, kind: type) -> Any:
        value = entry.get(name)
        if type(value) is not kind:  # isinstance would take true for 1
            raise self._wrong(where, f"needs {name!r} of type {kind.__name__}, got {value!r:.80}")
        return value

    def _once(self, is_repeated: bool, where: str, what: str) -> None:
        if is_repeated:
            raise WorkloadError(f"{self.path}: {where} repeats the {what}: remove one of the two")

    def _wrong(self, where: str, complaint: str) -> WorkloadError:
        return WorkloadError(f"{self.path}: {where} {complaint}: {_FORMAT}")


def _read_lists(path: Path) -> dict[str, list[Any]]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read ({error.strerror}): pass the COCO instances file") from error
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} is not valid JSON ({error}): export or download it again") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise WorkloadError(f"{path} has no list {key!r}: {_FORMAT}")
    lists: dict[str, list[Any]] = document
    return lists


def _to_float(number: float) -> float:
    """Return a number of a JSON file, infinity for an integer that no float holds."""
    try:
        return float(number)
    except OverflowError:
        return math.inf
