"""Fit lucid-yolo's detector with its own trainer, and with lucid's MuSGD put in from outside.

The trainer, its modules, data pipeline and callbacks are lucid-yolo 0.5 from PyPI as it stands; of lucid there are an
optimizer, a callback and the deterministic settings. Without --images and --annotations it trains on generated
photographs of COCO's sizes.

    pip install lucid-yolo==0.5.0.dev2 pytorch-lightning==2.6.6
"""

import argparse
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir, mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

NUM_CLASSES = 80
STRIDE = 32  # of the detector's coarsest head
MAX_SEED = 2**32 - 1  # Lightning's
# The sizes of COCO val2017 that are met most often, (width, height).
SIZES = ((640, 480), (640, 427), (640, 426), (480, 640), (640, 425), (427, 640), (500, 375), (640, 360))
JPEG_QUALITY = 95  # with this noise, files of about 140 kB
MAX_OBJECTS = 14
MAX_PIXELS = 2**31
ABSENT = object()
NO_COCO = "is no file of COCO's instances"
OPTIMIZERS = {"ours": "ours", "own": "own", "native": "ours", "captured": "ours"}
OPTIMIZER_VARIABLE = "LUCID_YOLO_OPTIMIZER"
# Modules, and the distributions whose versions belong to the settings of a run.
NEEDED = {
    "lucid_yolo": "lucid-yolo",
    "pytorch_lightning": "pytorch-lightning",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "faster_coco_eval": "faster-coco-eval",
    "fvcore": "fvcore",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is fitted, on what, for how long."""

    epochs: int
    optimizer: str
    """`ours` or `own`."""
    images: Path | None
    annotations: Path | None
    num_train: int
    num_val: int
    cache: Path
    size: int
    batch: int
    workers: int
    threads: int
    seed: int
    limit_batches: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The images of a training or a validation, as COCO lays them out."""

    images: Path
    annotations: Path


def parse(words: Sequence[str] | None = None) -> Options:
    """Return the options of a command line; what cannot be used ends the program with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=_positive, default=3)
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=os.environ.get(OPTIMIZER_VARIABLE, "ours"),
        help=f"lucid's MuSGD (native and captured mean it too) or the trainer's own; or {OPTIMIZER_VARIABLE}",
    )
    parser.add_argument("--images", type=Path, help="folder of COCO images; generated ones where there is none")
    parser.add_argument("--annotations", type=Path, help="COCO's JSON for --images")
    parser.add_argument("--num-train", type=_positive, default=256, help="the first images in the order of their names")
    parser.add_argument("--num-val", type=_positive, default=32, help="the images after those")
    parser.add_argument("--cache", type=Path, default=Path(gettempdir(), "lucid-yolo-fit"), help="prepared data")
    parser.add_argument("--size", type=_positive, default=640, help=f"of a square image, a multiple of {STRIDE}")
    parser.add_argument("--batch", type=_positive, default=4)
    parser.add_argument("--workers", type=_natural, default=4)
    parser.add_argument("--threads", type=_positive, default=4)
    parser.add_argument("--seed", type=_natural, default=42)
    parser.add_argument("--limit-batches", type=_positive, help="batches of an epoch, for a quick look")
    values = vars(parser.parse_args(words))
    if (values["images"] is None) != (values["annotations"] is None):
        parser.error("--images and --annotations belong together: give both, or neither for generated images")
    if values["images"] is not None and not os.path.isdir(values["images"]):  # noqa: PTH112 - pathlib's can raise
        parser.error(f"--images: {values['images']} is no folder")
    if values["annotations"] is not None and not os.path.isfile(values["annotations"]):  # noqa: PTH113 - likewise
        parser.error(f"--annotations: {values['annotations']} is no file")
    if values["size"] % STRIDE:
        parser.error(f"--size: {values['size']} is no multiple of {STRIDE}")
    if values["seed"] > MAX_SEED:
        parser.error(f"--seed: {values['seed']} is more than {MAX_SEED}")
    if values["optimizer"] not in OPTIMIZERS:  # argparse does not look at a default
        parser.error(f"{OPTIMIZER_VARIABLE}={values['optimizer']!r}: choose from {', '.join(OPTIMIZERS)}")
    return Options(**values | {"optimizer": OPTIMIZERS[values["optimizer"]]})


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(smallest: int, text: str) -> int:
    if not text.isdecimal() or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {smallest} on")
    return int(text)


def check_installed() -> None:
    """Say what is missing before anything is prepared.

    Raises:
        SystemExit: If a module that the trainer needs is not there.
    """
    missing = [distribution for module, distribution in NEEDED.items() if util.find_spec(module) is None]
    if missing:
        raise SystemExit(
            f"not installed: {', '.join(missing)}; pip install lucid-yolo==0.5.0.dev2 pytorch-lightning==2.6.6 brings "
            "what the trainer needs"
        )


def prepare(options: Options) -> tuple[Split, Split]:
    """Return the two splits; what is generated or selected is kept in the cache folder for the next run.

    Raises:
        SystemExit: If there are too few images, one of them is missing, or annotations or cache cannot be used.
    """
    if options.images is None or options.annotations is None:
        name = f"generated-{options.num_train}-{options.num_val}-{options.seed}"
        folder = _once(options.cache / name, lambda place: _generate(place, options))
        images = folder / "images"
    else:
        images, annotations = options.images.resolve(), options.annotations.resolve()
        stat = annotations.stat()
        chosen = [str(annotations), stat.st_size, stat.st_mtime_ns, options.num_train, options.num_val]
        name = f"coco-{hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]}"
        folder = _once(options.cache / name, lambda place: _select(place, annotations, options))
    train, val = (Split(images=images, annotations=folder / f"{name}.json") for name in ("train", "val"))
    try:
        files = [*_files(train), *_files(val)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--cache: {folder} cannot be used ({error!r}): remove it") from error
    for path in files:
        if not os.path.isfile(path):  # noqa: PTH113 - of a name that is too long, pathlib's raises
            raise SystemExit(f"{path} is missing: remove {folder} if images were deleted, or complete --images")
    return train, val


def _files(split: Split) -> list[Path]:
    return [split.images / image["file_name"] for image in json.loads(split.annotations.read_bytes())["images"]]


def digest(splits: Sequence[Split]) -> str:
    """Return a digest of every annotation and every byte of every image."""
    total = hashlib.sha256()
    for split in splits:
        for path in (split.annotations, *_files(split)):
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a folder, filled elsewhere and moved into place whole if it is not there."""
    if not os.path.exists(folder):  # noqa: PTH110 - of a name that is too long, pathlib's raises
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            place = Path(mkdtemp(prefix=folder.name, dir=folder.parent))
        except OSError as error:
            raise SystemExit(f"--cache: {error.strerror}: {folder.parent}") from error
        try:
            fill(place)
            place.rename(folder)
        except OSError as error:
            if not folder.exists():  # else another process was first
                raise SystemExit(f"--cache: {error.strerror}: {folder}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return folder


def _select(folder: Path, annotations: Path, options: Options) -> None:
    """Write the annotations of the first images, by name, and of those after them."""
    try:
        everything = json.loads(annotations.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"--annotations: {annotations} {NO_COCO}: {error}") from error
    for fault in _faults(everything):
        raise SystemExit(f"--annotations: {annotations} {NO_COCO}: {fault}")
    ordered = sorted(everything["images"], key=lambda image: image["file_name"])
    needed = options.num_train + options.num_val
    if len(ordered) < needed:
        raise SystemExit(
            f"{annotations} names {len(ordered)} images, {needed} are needed: lower --num-train, --num-val"
        )
    for name, images in (("train", ordered[: options.num_train]), ("val", ordered[options.num_train : needed])):
        ids = {image["id"] for image in images}
        of_images = [one for one in everything["annotations"] if one["image_id"] in ids]
        _write(folder / f"{name}.json", images=images, annotations=of_images, categories=everything["categories"])


def _faults(everything: Any) -> Iterator[str]:
    """Yield what is not as COCO has it, of all that the trainer will read: whoever goes on after one may fail."""
    if not isinstance(everything, dict):
        yield "it holds no object"
    for name, fields in COCO_FIELDS.items():
        if not isinstance(everything.get(name), list):
            yield f"it has no list {name!r}"
        for place, one in enumerate(everything[name]):
            for field, (is_right, what) in fields.items():
                if not (isinstance(one, dict) and is_right(one.get(field, ABSENT))):
                    yield f"{name}[{place}] has no {field!r} that is {what}"
    yield from _contradictions(everything)


def _contradictions(everything: dict[str, Any]) -> Iterator[str]:
    """Yield what does not go together, where every field is sound."""
    known = {one["id"] for one in everything["categories"]}
    if not 0 < len(known) <= NUM_CLASSES:
        yield f"it has {len(known)} categories, the detector 1 to {NUM_CLASSES}"
    for name in ("images", "categories"):
        if len({one["id"] for one in everything[name]}) < len(everything[name]):
            yield f"two {name} have the same 'id'"
    for place, one in enumerate(everything["annotations"]):
        if one["category_id"] not in known:
            yield f"annotations[{place}] is of category {one['category_id']}, which is not listed"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_extent(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_pixels, value))


def _is_pixels(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_PIXELS  # no NaN is


def _is_flag(value: Any) -> bool:
    return value is ABSENT or (_is_whole(value) and value in {0, 1})


def _is_area(value: Any) -> bool:
    return value is ABSENT or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf)


WHOLE = (_is_whole, "a whole number")
EXTENT = (_is_extent, "a number of pixels")
COCO_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {
        "id": WHOLE,
        "file_name": (lambda value: isinstance(value, str), "a text"),
        "width": EXTENT,
        "height": EXTENT,
    },
    "categories": {"id": WHOLE},
    "annotations": {
        "image_id": WHOLE,
        "category_id": WHOLE,
        "bbox": (_is_box, "four numbers of pixels"),
        "iscrowd": (_is_flag, "0 or 1, or absent"),
        "area": (_is_area, "a number from 0 on, or absent"),
    },
}


def _generate(folder: Path, options: Options) -> None:
    """Write photographs that nobody took, with what is on them."""
    (folder / "images").mkdir()
    categories = [{"id": number, "name": f"thing {number}"} for number in range(1, NUM_CLASSES + 1)]
    first = 1
    for name, num in (("train", options.num_train), ("val", options.num_val)):
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(first, first + num):
            pixels, boxes = picture(np.random.default_rng((options.seed, number)))
            image = {
                "id": number,
                "file_name": f"{number:012}.jpg",
                "width": pixels.shape[1],
                "height": pixels.shape[0],
            }
            Image.fromarray(pixels).save(folder / "images" / image["file_name"], quality=JPEG_QUALITY)
            images.append(image)
            annotations += [
                {
                    "id": len(annotations) + place,
                    "image_id": number,
                    "category_id": category,
                    "bbox": list(box),
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
                for place, (category, box) in enumerate(boxes, 1)
            ]
        _write(folder / f"{name}.json", images=images, annotations=annotations, categories=categories)
        first += num


def picture(
    random: np.random.Generator,
) -> tuple[NDArray[np.uint8], list[tuple[int, tuple[float, float, float, float]]]]:
    """Return pixels `(height, width, 3)` and, for each object, its class from 1 and its box (left, top, width, height).

    Noise of many sizes compresses and decodes about as photographs do; objects are ellipses with a colour a class.
    """
    width, height = SIZES[random.integers(len(SIZES))]
    canvas = sum(
        _noise(random, (height, width), cell) * weight for cell, weight in ((160, 70), (40, 45), (8, 25), (1, 20))
    )
    pixels = np.asarray(canvas, np.float32) + 110
    objects = []
    for _ in range(random.integers(1, MAX_OBJECTS + 1)):
        category = int(random.integers(1, NUM_CLASSES + 1))
        size = random.uniform(0.05, 0.5, 2) * (width, height)
        left, top = random.uniform(0, (width, height) - size)
        rows, columns = np.ogrid[:height, :width]
        inside = ((columns - left) / size[0] * 2 - 1) ** 2 + ((rows - top) / size[1] * 2 - 1) ** 2 <= 1
        colour = np.array((category * 37 % 256, category * 91 % 256, category * 151 % 256), np.float32)
        pixels[inside] = 0.35 * pixels[inside] + 0.65 * colour
        box = (float(left), float(top), float(size[0]), float(size[1]))
        objects.append((category, (round(box[0], 2), round(box[1], 2), round(box[2], 2), round(box[3], 2))))
    return pixels.clip(0, 255).astype(np.uint8), objects


def _noise(random: np.random.Generator, shape: tuple[int, int], cell: int) -> NDArray[np.float32]:
    """Return noise `(height, width, 3)` from -1 to 1 whose grains have the size of a cell."""
    rows, columns = (-(-extent // cell) + 1 for extent in shape)
    grid = random.uniform(-1, 1, (rows, columns, 3)).astype(np.float32)
    if cell == 1:
        return grid[: shape[0], : shape[1]]
    planes = [
        np.asarray(Image.fromarray(grid[..., plane]).resize((columns * cell, rows * cell), Image.Resampling.BICUBIC))
        for plane in range(3)
    ]
    return np.stack(planes, axis=-1)[: shape[0], : shape[1]]


def _write(file: Path, **contents: Any) -> None:
    file.write_text(json.dumps(contents), encoding="utf-8")


def put_in_ours(module: Any) -> None:
    """Let a lucid-yolo module train with lucid's MuSGD, under the settings and schedule that it would give its own."""
    from torch.optim.lr_scheduler import LambdaLR  # noqa: PLC0415 - the parts above need no torch

    from lucid_optim import MuSGD  # noqa: PLC0415 - likewise

    own = module.configure_optimizers

    def configure_optimizers() -> dict[str, Any]:
        configured = own()
        schedule = configured["lr_scheduler"]
        optimizer = MuSGD(module.parameters(), **configured["optimizer"].defaults)
        scheduler = LambdaLR(optimizer, schedule["scheduler"].lr_lambdas)
        return {"optimizer": optimizer, "lr_scheduler": schedule | {"scheduler": scheduler}}

    module.configure_optimizers = configure_optimizers


def fit(options: Options, splits: tuple[Split, Split]) -> None:
    """Train, and print what the last validation came to."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA is used
    # A wrong option is told before these load.
    import pytorch_lightning as lightning  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from lucid_yolo.models.registry import scale_spec  # noqa: PLC0415
    from lucid_yolo.ptl.callbacks import EMACallback  # noqa: PLC0415
    from lucid_yolo.ptl.datamodule import DetectionDataModule  # noqa: PLC0415
    from lucid_yolo.ptl.module import DetectionLitModule  # noqa: PLC0415

    import lucid_profiler  # noqa: PLC0415
    from lucid_profiler.integrations.lightning import LucidCallback  # noqa: PLC0415

    lightning.seed_everything(options.seed, workers=True)
    torch.set_num_threads(options.threads)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    precision = "bf16-mixed" if has_bfloat16 else "32-true"
    train, val = splits
    scale = scale_spec("n")
    module = DetectionLitModule(scale.depth, scale.width, scale.max_channels, NUM_CLASSES)
    if options.optimizer == "ours":
        put_in_ours(module)
    data = DetectionDataModule(
        options.cache,
        options.batch,
        options.workers,
        "n",
        options.size,
        train_images_dir=train.images,
        train_ann_file=train.annotations,
        val_images_dir=val.images,
        val_ann_file=val.annotations,
        seed=options.seed,
        val_num_workers=options.workers,
        persistent_workers=options.workers > 0,
        layout="coco",
    )
    with TemporaryDirectory(prefix="lucid-yolo-fit-", ignore_cleanup_errors=True) as checkpoints:
        trainer = lightning.Trainer(
            devices=1,
            max_epochs=options.epochs,
            precision=precision,
            gradient_clip_val=10.0,
            deterministic=True,
            benchmark=False,
            callbacks=[LucidCallback(), EMACallback()],
            default_root_dir=checkpoints,
            limit_train_batches=options.limit_batches,
            limit_val_batches=options.limit_batches,
            logger=False,  # one would want TensorBoard
            enable_progress_bar=False,  # the output is no terminal, and a bar waits for the device in every step
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in ("train/loss", "val/loss", "val/mAP") if name in metrics))
    settings = {
        **{name: getattr(options, name) for name in ("epochs", "num_train", "num_val", "size", "batch", "seed")},
        **{name: getattr(options, name) for name in ("optimizer", "workers", "threads", "limit_batches")},
        "data": "generated" if options.images is None else "coco",
        "data_digest": digest(splits),
        **{f"{name} version": metadata.version(name) for name in NEEDED.values()},
        "precision": precision,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.utils.deterministic.fill_uninitialized_memory": False,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "CUBLAS_WORKSPACE_CONFIG": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }
    lucid_profiler.state("settings", settings)


def main() -> None:
    """Prepare the data, outside of the timed interval, and fit."""
    options = parse()
    check_installed()
    fit(options, prepare(options))


if __name__ == "__main__":
    main()
