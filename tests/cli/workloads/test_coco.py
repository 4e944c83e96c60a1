import json
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lucid_cli.workloads.detection.coco import Coco, CocoPictures, read_coco
from lucid_cli.workloads.detection.dataset import DetectionDataset
from lucid_cli.workloads.detection.errors import WorkloadError

Document = dict[str, Any]
Edit = Callable[[Document], object]


def document() -> Document:
    """Return four images of 40 x 30 pixels, the last without objects, not sorted, with sparse category ids."""
    names = ["c.png", "a.png", "d.png", "b.png"]
    return {
        "images": [{"id": 10 + row, "file_name": name, "width": 40, "height": 30} for row, name in enumerate(names)],
        "categories": [{"id": 90, "name": "zebra"}, {"id": 7, "name": "apple"}],
        "annotations": [
            {"id": 1, "image_id": 11, "category_id": 90, "bbox": [4, 5, 10, 20], "iscrowd": 0},
            {"id": 2, "image_id": 11, "category_id": 7, "bbox": [0.5, 0.25, 3, 4.5], "iscrowd": 0},
            {"id": 3, "image_id": 13, "category_id": 7, "bbox": [1, 2, 3, 4]},
            {"id": 4, "image_id": 10, "category_id": 90, "bbox": [10, 10, 5, 5]},
        ],
    }


class Folder:
    """A folder of PNG images with an annotations file beside it."""

    def __init__(self, root: Path) -> None:
        self.images = root / "images"
        self.images.mkdir()
        self.annotations = root / "instances.json"
        for shade, name in enumerate("abcd"):
            Image.new("RGB", (40, 30), (shade * 40, 20, 30)).save(self.images / f"{name}.png")
        self.write(document())

    def write(self, content: Any) -> None:
        """Replace the annotations file."""
        self.annotations.write_text(json.dumps(content), encoding="utf-8")

    def edit(self, change: Edit) -> None:
        """Replace the annotations file by a changed one."""
        content = document()
        change(content)
        self.write(content)

    def read(self, *, num_train: int = 2, num_val: int = 2) -> Coco:
        """Read the folder, all of it by default."""
        return read_coco(self.images, self.annotations, num_train=num_train, num_val=num_val)

    def decode(self) -> list[torch.Tensor]:
        """Return the pixels of all four images, by file name."""
        coco = self.read()
        return [image for image, _ in map(CocoPictures(coco.train + coco.val, coco.names).__getitem__, range(4))]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a folder that reads without a complaint."""
    return Folder(tmp_path)


def test_the_first_sorted_names_train_and_the_next_validate(folder: Folder) -> None:
    """Order is that of file names, not of the file; no image is in both; an image without objects is kept, empty."""
    coco = folder.read()
    assert [image.path.name for image in coco.train] == ["a.png", "b.png"]
    assert [image.path.name for image in coco.val] == ["c.png", "d.png"]
    assert coco.val[1].boxes.shape == (0, 4)
    assert coco.val[1].classes.shape == (0,)
    assert coco.skipped == {}
    assert [image.path.name for image in folder.read(num_train=1, num_val=1).val] == ["b.png"]


def test_boxes_become_corners_and_category_ids_contiguous(folder: Folder) -> None:
    """`x y width height` become `x1 y1 x2 y2`; classes count from 0 in the order of ids and keep their names."""
    coco = folder.read()
    assert coco.names == ("apple", "zebra")
    assert coco.train[0].boxes.tolist() == [[4, 5, 14, 25], [0.5, 0.25, 3.5, 4.75]]
    assert coco.train[0].boxes.dtype == torch.float32
    assert coco.train[0].classes.tolist() == [1, 0]


def test_pictures_are_decoded_as_rgb(folder: Folder) -> None:
    """Grey, palette and transparent files all become `(3, height, width)` uint8, without a warning."""
    grey = Image.new("L", (40, 30), 200)
    grey.save(folder.images / "b.png")
    grey.convert("P").save(folder.images / "c.png", transparency=bytes(range(256)))
    Image.new("RGBA", (40, 30), (1, 2, 3, 4)).save(folder.images / "d.png")
    pixels = folder.decode()
    assert {(image.dtype, image.shape) for image in pixels} == {(torch.uint8, (3, 30, 40))}
    assert [image[:, 29, 39].tolist() for image in pixels] == [[0, 20, 30], [200] * 3, [200] * 3, [1, 2, 3]]


def test_pixels_are_where_the_file_has_them(folder: Folder) -> None:
    """Rows are rows and columns are columns: a single red pixel is found at its place."""
    picture = Image.new("RGB", (40, 30))
    picture.putpixel((33, 4), (255, 0, 0))
    picture.save(folder.images / "a.png")
    assert folder.decode()[0].nonzero().tolist() == [[0, 4, 33]]


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([-5, -6, 20, 20], [0, 0, 15, 14]),
        ([30, 20, 100, 100], [30, 20, 40, 30]),
        ([-1e300, -1e300, 2e300, 2e300], [0, 0, 40, 30]),
        ([39.5, 29.5, 0.5, 0.5], [39.5, 29.5, 40, 30]),
    ],
)
def test_a_box_that_reaches_over_the_edge_is_clipped(folder: Folder, box: list[float], expected: list[float]) -> None:
    """What is inside stays, and nothing is counted as skipped."""
    folder.edit(lambda content: content["annotations"][0].update(bbox=box))
    coco = folder.read()
    assert coco.train[0].boxes[0].tolist() == expected
    assert coco.skipped == {}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"bbox": [50, 5, 10, 10]}, "box outside the image"),
        ({"bbox": [40, 0, 10, 10]}, "box outside the image"),
        ({"bbox": [4, -30, 10, 10]}, "box outside the image"),
        ({"bbox": [4, 5, 0, 10]}, "box without area"),
        ({"bbox": [4, 5, -10, 10]}, "box without area"),
        ({"bbox": [4, 5, 1e-30, 10]}, "box outside the image"),
        ({"bbox": [float("nan"), 5, 10, 10]}, "box not finite"),
        ({"bbox": [4, 5, float("inf"), 10]}, "box not finite"),
        ({"bbox": [4, 5, 10**400, 10]}, "box not finite"),
        ({"iscrowd": 1}, "crowd annotation"),
        ({"image_id": 999}, "annotation of an image that is not listed"),
    ],
)
def test_an_annotation_that_cannot_be_used_is_skipped_and_counted(
    folder: Folder, entry: dict[str, Any], reason: str
) -> None:
    """The other annotation of the image stays, and the count has the reason."""
    folder.edit(lambda content: content["annotations"][0].update(entry))
    coco = folder.read()
    assert coco.train[0].classes.tolist() == [0]
    assert coco.skipped == {reason: 1}


def test_a_missing_image_file_is_passed_over_and_counted(folder: Folder) -> None:
    """The next name takes its place."""
    (folder.images / "b.png").unlink()
    coco = folder.read(num_val=1)
    assert [image.path.name for image in coco.train + coco.val] == ["a.png", "c.png", "d.png"]
    assert coco.skipped == {"image file missing": 1}


def test_skips_count_only_what_was_asked_for(folder: Folder) -> None:
    """A crowd in an image that no one reads is no one's concern."""
    folder.edit(lambda content: content["annotations"][3].update(iscrowd=1))
    assert folder.read(num_train=1, num_val=1).skipped == {}
    assert folder.read().skipped == {"crowd annotation": 1}


def test_too_few_images_are_an_error_with_the_counts(folder: Folder) -> None:
    """The message says how many are asked for, how many there are and how many are missing."""
    (folder.images / "c.png").unlink()
    with pytest.raises(WorkloadError, match=r"4 images are asked for.* 3 are in .*\(1 missing\): ask for fewer"):
        folder.read()


@pytest.mark.parametrize(("num_train", "num_val"), [(0, 1), (1, -1)])
def test_impossible_numbers_are_refused(folder: Folder, num_train: int, num_val: int) -> None:
    """There is no training without a training image."""
    with pytest.raises(WorkloadError, match="at least 1 training"):
        folder.read(num_train=num_train, num_val=num_val)


def test_a_folder_that_is_none_is_named(folder: Folder, tmp_path: Path) -> None:
    """The remedy is to pass the right one."""
    with pytest.raises(WorkloadError, match="nowhere is no folder: pass the one that holds the images"):
        read_coco(tmp_path / "nowhere", folder.annotations, num_train=1, num_val=1)


@pytest.mark.parametrize("content", [b"", b"{", b'{"images": [', b"\xff\xfe\xfa", b"[" * 200_000, b"9" * 5000])
def test_broken_json_is_one_error(folder: Folder, content: bytes) -> None:
    """Whatever the bytes, the message names the file and says what to do."""
    folder.annotations.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"instances.json is not valid JSON \(.*\): export or download it again"):
        folder.read()


def test_an_annotations_file_that_cannot_be_read_is_one_error(folder: Folder, tmp_path: Path) -> None:
    """A missing file and a folder in its place both say why."""
    folder.annotations.unlink()
    with pytest.raises(WorkloadError, match=r"cannot be read \(No such file or directory\): pass"):
        folder.read()
    with pytest.raises(WorkloadError, match=r"cannot be read \(Is a directory\): pass"):
        read_coco(folder.images, tmp_path, num_train=1, num_val=1)


@pytest.mark.parametrize("content", [[], 3, None, {}, {"images": [], "annotations": {}, "categories": []}])
def test_json_of_another_kind_is_one_error(folder: Folder, content: Any) -> None:
    """The message names the list that is missing, and the format."""
    folder.write(content)
    with pytest.raises(WorkloadError, match=r"has no list '(images|annotations)': write the file in COCO's"):
        folder.read()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["images"].append(5), r"images\[4\] is no object"),
        (lambda content: content["images"][2].pop("file_name"), r"images\[2\] needs 'file_name' of type str, got None"),
        (lambda content: content["images"][2].update(file_name=""), r"images\[2\] has no usable file name"),
        (lambda content: content["images"][2].update(width=0), r"images\[2\] has no usable .* width or height"),
        (lambda content: content["images"][2].update(height=-3), r"images\[2\] has no usable .* width or height"),
        (lambda content: content["images"][2].update(height=10**400), r"images\[2\] has no usable .* width or height"),
        (lambda content: content["images"][2].update(width="40"), r"images\[2\] needs 'width' of type int, got '40'"),
        (lambda content: content["images"][2].update(id=True), r"images\[2\] needs 'id' of type int, got True"),
        (lambda content: content["images"][2].update(id=10), r"images\[2\] repeats the id 10: remove one"),
        (lambda content: content["images"][2].update(file_name="./c.png"), r"images\[2\] repeats the file name"),
        (lambda content: content.update(categories=[]), "no categories, so there is nothing to detect"),
        (lambda content: content["categories"][1].update(id=90), r"categories\[1\] repeats the id 90"),
        (lambda content: content["categories"][1].pop("name"), r"categories\[1\] needs 'name' of type str"),
        (lambda content: content["annotations"][1].update(id=1), r"annotations\[1\] repeats the id 1: remove one"),
        (
            lambda content: content["annotations"][1].update(category_id=8),
            r"annotations\[1\] has the category 8, which",
        ),
        (lambda content: content["annotations"][1].pop("image_id"), r"annotations\[1\] needs 'image_id' of type int"),
        (lambda content: content["annotations"][1].pop("bbox"), r"annotations\[1\] needs 'bbox' of type list"),
        (lambda content: content["annotations"][1].update(bbox=[1, 2, 3]), r"bbox \[1, 2, 3\], which is not four"),
        (lambda content: content["annotations"][1].update(bbox=[1, 2, 3, "4"]), "which is not four numbers"),
        (lambda content: content["annotations"][1].update(bbox=[1, 2, 3, True]), "which is not four numbers"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(folder: Folder, edit: Edit, message: str) -> None:
    """One error with the file, the entry and the remedy."""
    folder.edit(edit)
    with pytest.raises(WorkloadError, match=rf"instances.json:? .*{message}"):
        folder.read()


def test_a_file_name_that_the_system_cannot_take_counts_as_missing(folder: Folder) -> None:
    """Names that are too long or hold a zero byte do not end the run."""
    names = ["b" * 5000, "b\0"]
    content = document()
    for name in names:
        content["images"][3]["file_name"] = name
        folder.write(content)
        assert folder.read(num_val=1).skipped == {"image file missing": 1}


def test_one_file_under_two_names_is_refused(folder: Folder) -> None:
    """Roundabout, absolute and linked names lead to the same file, which would be trained on and validated with."""
    (folder.images / "sub").mkdir()
    (folder.images / "z.png").symlink_to(folder.images / "a.png")
    for name in ("sub/../a.png", str(folder.images / "a.png"), "z.png"):
        content = document()
        content["images"][2]["file_name"] = name
        folder.write(content)
        with pytest.raises(WorkloadError, match=r"instances.json: .* are the same image: remove one of the two"):
            folder.read()


def write_text(path: Path) -> None:
    """Write what is no image."""
    path.write_bytes(b"no image at all")


def write_nothing(path: Path) -> None:
    """Empty the file."""
    path.write_bytes(b"")


def write_half(path: Path) -> None:
    """Write the beginning of a PNG."""
    Image.effect_noise((40, 30), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:600])


def write_half_jpeg(path: Path) -> None:
    """Write the beginning of a JPEG, under whatever name."""
    Image.effect_noise((40, 30), 90).convert("RGB").save(path, format="JPEG")
    path.write_bytes(path.read_bytes()[:500])


def write_damaged(path: Path) -> None:
    """Overwrite compressed pixels."""
    content = bytearray(path.read_bytes())
    content[45:60] = bytes(15)
    path.write_bytes(content)


def write_bomb(path: Path) -> None:
    """Write a PNG that claims to be 60 000 pixels wide and high."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + checksum)


@pytest.mark.parametrize(
    "damage", [write_text, write_nothing, write_half, write_half_jpeg, write_damaged, write_bomb, Path.unlink]
)
def test_an_image_that_cannot_be_decoded_is_named_when_it_is_read(
    folder: Folder, damage: Callable[[Path], object]
) -> None:
    """One error with the file's path and the remedy; the file is closed (ResourceWarning is an error here)."""
    coco = folder.read()
    damage(folder.images / "b.png")
    pictures = CocoPictures(coco.train, coco.names)
    assert pictures[0][0].shape == (3, 30, 40)
    with pytest.raises(WorkloadError, match=r"b.png cannot be decoded \(.*\): replace the file"):
        pictures[1]


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_an_image_of_more_than_eight_bits_is_refused(folder: Folder, mode: str) -> None:
    """Cut off to eight bits it would be one shade all over."""
    Image.new(mode, (40, 30), 30_000).save(folder.images / "b.png", format="TIFF")
    with pytest.raises(WorkloadError, match=r"b.png has more than 8 bits a channel.*: convert it to 8 bits"):
        folder.decode()


@pytest.mark.parametrize("colour", [2, 4, 6])
def test_a_colour_image_of_sixteen_bits_is_refused(folder: Folder, colour: int) -> None:
    """RGB, grey with alpha and RGBA: Pillow would cut all of them off without a word."""
    channels = {2: 3, 4: 2, 6: 4}[colour]
    header = struct.pack(">IIBBBBB", 40, 30, 16, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(30 * (1 + 40 * 2 * channels)))), (b"IEND", b"")]
    content = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (folder.images / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(WorkloadError, match=r"b.png has more than 8 bits a channel.*: convert it to 8 bits"):
        folder.decode()


def test_an_image_of_another_size_than_annotated_is_refused(folder: Folder) -> None:
    """Boxes of a turned or shrunk image would lie elsewhere; both sizes are in the message."""
    Image.new("RGB", (30, 40)).save(folder.images / "b.png")
    with pytest.raises(WorkloadError, match=r"b.png is 30 x 40 pixels, annotated as 40 x 30"):
        folder.decode()


def test_without_pillow_the_remedy_is_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the annotations needs no Pillow; decoding names the package."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    coco = folder.read()
    with pytest.raises(WorkloadError, match="pip install pillow"):
        CocoPictures(coco.train, coco.names)[0]


@pytest.mark.parametrize("cache", [False, True])
def test_pictures_are_fitted_to_the_square_of_a_data_set(folder: Folder, cache: bool) -> None:
    """40 x 30 in a square of 80: twice as large, ten rows of grey above and below, boxes moved along."""
    coco = folder.read()
    dataset = DetectionDataset(CocoPictures(coco.train, coco.names), 80, cache=cache)
    image, targets = dataset[0]
    assert dataset.names == ("apple", "zebra")
    assert image[:, 9].unique().tolist() == [114]
    assert image[0, 10:70].unique().tolist() == [0]
    assert targets.boxes.tolist() == [[8, 20, 28, 60], [1, 10.5, 7, 19.5]]
