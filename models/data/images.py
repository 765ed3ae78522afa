"""Labelled pictures from folders of classes, arrays or CIFAR's files, or generated from a seed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.data.arrays import halves, mapped
from models.data.batches import Source
from models.data.examples import Examples
from models.data.extras import optional_module
from models.data.files import PICTURES, files_of, readable
from models.data.picture import Picture
from models.data.synthetic import SyntheticMasks, SyntheticPictures
from models.errors import InputError

VALIDATION = ("validation", "val", "test")  # names of a folder with the validation part
_CIFAR = (32, 32, 3)  # height, width and channels of CIFAR's pictures
_MODES = {1: "L", 3: "RGB"}  # Pillow's names of pixel formats, by number of channels


class Arrays:
    """Pictures and labels in arrays.

    Pictures are uint8 `[N, height, width]` or `[N, height, width, channels]`. Labels are integers
    `[N]`, or `[N, height, width]` for a class per pixel.

    Attributes:
      classes: number of classes: the largest label plus one.
      has_one_class: whether all labels are equal.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, name: str) -> None:
        if images.ndim not in (3, 4) or images.dtype != np.uint8 or 0 in images.shape[1:]:
            raise InputError(
                f"images of {name} are {images.dtype} {images.shape}, but must be uint8"
                " [count, height, width, channels]"
            )
        if (
            labels.shape not in (images.shape[:1], images.shape[:3])
            or labels.dtype.kind not in "iu"
        ):
            raise InputError(
                f"labels of {name} are {labels.dtype} {labels.shape}, but must be integers"
                f" {images.shape[:1]} or {images.shape[:3]}"
            )
        if not labels.size:
            raise InputError(f"{name} holds no pictures: add some")
        least, most = int(labels.min()), int(labels.max())
        if least < 0:
            raise InputError(f"the smallest label of {name} is {least}: labels must start at 0")
        self._images, self._labels = images, labels
        self.classes, self.has_one_class = most + 1, least == most

    def content(self) -> Iterator[np.ndarray | str]:
        """Iterate over the arrays that define the data."""
        yield from (self._images, self._labels)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Picture:
        image = np.asarray(self._images[index])
        image = image[..., None] if image.ndim == 2 else image
        return {"image": image, "label": np.asarray(self._labels[index], np.int32)}


class Files:
    """Picture files in one folder per class. A file is read when its element is used.

    Attributes:
      names: the names of the classes, sorted; a label is an index into them.
      classes: number of classes.
      has_one_class: whether all pictures are of the same class.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None, channels: int = 3) -> None:
        with readable():
            folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        self.names = [path.name for path in folders if not path.name.startswith(".")]
        self.classes = len(self.names)
        self._library: Any = optional_module("PIL.Image", str(folder))
        if channels not in _MODES:
            raise InputError(f"the model reads pictures of {channels} channels, but the files in"
                             f" {folder} have 1 or 3")  # fmt: skip
        self._mode = _MODES[channels]
        self._found = [
            (file, number)
            for number, name in enumerate(self.names)
            for file in files_of(folder / name)
            if file.suffix.lower() in PICTURES
        ]
        if not self._found:
            raise InputError(f"{folder} holds no pictures: give it a folder of pictures per class")
        for file, number in self._found:
            if file.parent != folder / self.names[number]:
                raise InputError(
                    f"{file} is not directly in the folder of its class: move it there. Folders for"
                    " the two parts of the data are named train and validation, val or test"
                )
        self.has_one_class = len({number for _, number in self._found}) == 1
        self._resize_to = size
        if size is None:
            self._check_sizes()

    def content(self) -> Iterator[np.ndarray | str]:
        """Iterate over the classes, and the names and sizes of their files; pixels are not read."""
        yield from self.names
        with readable():
            for file, number in self._found:
                yield f"{number} {file.name} {file.stat().st_size}"

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Picture:
        file, label = self._found[index]
        with self._opened(file) as picture:
            pixels = self._as_8_bits(picture, file).convert(self._mode)
            pixels = np.asarray(
                pixels if self._resize_to is None else pixels.resize(self._resize_to)
            )
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
        return {"image": pixels, "label": np.asarray(label, np.int32)}

    def _check_sizes(self) -> None:
        """Raise an `InputError` unless all files have one size, according to their headers."""
        first: tuple[int, int] | None = None
        for file, _ in self._found:
            with self._opened(file) as picture:
                first = first or picture.size
                if picture.size != first:
                    raise InputError(f"{file} has {picture.size} pixels, but others have {first}:"
                                     " give --resize to resize all of them")  # fmt: skip

    def _as_8_bits(self, picture: Any, file: Path) -> Any:
        """Convert a picture to 8 bits: 16-bit values keep their upper 8, as in Pillow for RGB."""
        if picture.has_transparency_data:
            opaque, _ = picture.convert("RGBA").getchannel("A").getextrema()
            if opaque < 255:
                raise InputError(f"{file} has transparent pixels: draw it on a background first")
        if picture.mode[0] not in "IF":
            return picture
        wide = np.asarray(picture)
        if wide.dtype.kind == "f" or wide.min() < 0 or wide.max() >= 2**16:
            raise InputError(f"{file} has pixel values that are not 8 or 16 bits: convert it")
        return self._library.fromarray((wide >> 8).astype(np.uint8))

    @contextlib.contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            with self._library.open(file) as picture:
                yield picture
        except InputError:
            raise
        # For a file that it cannot read, Pillow raises OSError, ValueError, SyntaxError and others.
        except Exception as error:
            raise InputError(f"{file} cannot be read as a picture: {error}") from None


def load_images(
    path: Path,
    *,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    validation_share: float = 0.05,
) -> Examples:
    """Load the pictures of a folder in two parts. The elements are `Picture`s.

    The folder holds `images.npy` and `labels.npy`, or CIFAR's binary files, or a folder of pictures
    for each class. If it has a folder `train` and a folder `validation`, `val` or `test`, these are
    the two parts. Otherwise a random share `validation_share` is for validation.

    Args:
      path: the folder.
      size: new width and height of picture files; None to require that all have one size.
      channels: channels that picture files are converted to, 1 or 3.
      validation_share: share for validation, if the folder has no parts.

    Raises:
      InputError: there are no pictures, all are of one class, they cannot be read or differ in
        size, or the two parts have different classes.
    """
    with readable():
        if path.is_file():
            raise InputError(
                f"{path} is not a folder of pictures: name a folder that holds one folder per"
                " class, or images.npy and labels.npy, or use a --preset for text or series"
            )
        names = {entry.name for entry in path.iterdir()}
    validation = [name for name in VALIDATION if name in names]
    if "train" in names and validation:
        folders = [path / name for name in ("train", validation[0])]
        return _two_parts(path, [_source(folder, size, channels) for folder in folders])
    if "data_batch_1" in names:
        raise InputError(f"{path} holds pickles, which can run any code when they are read: use the"
                         " binary version of CIFAR")  # fmt: skip
    if train := sorted(n for n in names if n.startswith(("data_batch_", "train.")) and _is_bin(n)):
        test = sorted(n for n in names if n.startswith("test") and _is_bin(n))
        return _two_parts(path, [_cifar(path, train), _cifar(path, test)])
    whole = _check_classes(path, _source(path, size, channels))
    return Examples(str(path), halves(whole, validation_share), whole.content, whole.classes)


def generated_images(
    whole: SyntheticPictures | SyntheticMasks, validation_share: float
) -> Examples:
    """Split generated pictures; a random share of `validation_share` is for validation."""
    content = lambda: [repr(whole)]
    return Examples("generated pictures", halves(whole, validation_share), content, whole.classes)


def _two_parts(path: Path, sources: Sequence[Arrays | Files]) -> Examples:
    """Combine a training and a validation source. If classes have names, the names must agree."""
    _check_classes(path, sources[0])
    names = [source.names for source in sources if isinstance(source, Files)]
    if len(names) == 2 and names[0] != names[1]:
        only_in_one = sorted({*names[0]} ^ {*names[1]})[0]
        raise InputError(
            f"{path} has pictures of the class {only_in_one!r} in only one of its two parts: give"
            " both the same classes"
        )
    parts: dict[str, Source] = dict(zip(("train", "validation"), sources, strict=True))
    content = lambda: itertools.chain.from_iterable(source.content() for source in sources)
    return Examples(str(path), parts, content, max(source.classes for source in sources))


def _check_classes(path: Path, training: Arrays | Files) -> Arrays | Files:
    """Return the training source; raise an `InputError` if it has only one class."""
    if training.has_one_class:
        raise InputError(f"the training part of {path} has only one class: add another class")
    return training


def _source(path: Path, size: tuple[int, int] | None, channels: int) -> Arrays | Files:
    """Open a folder of `images.npy` and `labels.npy`, or of one folder of pictures per class."""
    if (path / "images.npy").exists():
        return Arrays(mapped(path / "images.npy"), mapped(path / "labels.npy"), str(path))
    return Files(path, size, channels)


def _is_bin(name: str) -> bool:
    return name.endswith(".bin")


def _cifar(path: Path, names: Sequence[str]) -> Arrays:
    """Read CIFAR's records: a label, then the pixels channel by channel.

    Records of CIFAR-100 have a coarse label before the label.
    """
    if not names:
        raise InputError(f"{path} lacks CIFAR's test file: download the binary version again")
    labels = 1 if names[0] != "train.bin" and names[0] != "test.bin" else 2
    record = labels + int(np.prod(_CIFAR))
    parts: list[np.ndarray] = []
    for name in names:
        with readable():
            part = np.fromfile(path / name, np.uint8)
        if not part.size or part.size % record:
            raise InputError(
                f"{path / name} is not a CIFAR file, or is truncated: download the binary version"
                " again"
            )
        parts.append(part.reshape(-1, record))
    records = np.concatenate(parts)
    height, width, channels = _CIFAR
    pixels = records[:, labels:].reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
    return Arrays(pixels, records[:, labels - 1].astype(np.int32), str(path))
