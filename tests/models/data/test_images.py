"""Pictures of each form: what they are, which part they are in, and what is refused."""

import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from PIL import Image

from models.data.augment import augmented
from models.data.images import load_images
from models.errors import InputError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 6, 5, 3), np.uint8)
LABELS = RNG.integers(0, 3, 40)


def elements(source: Any) -> list[tuple[bytes, Any]]:
    return sorted(
        (e["image"].tobytes(), e["label"].tolist())
        for e in map(source.__getitem__, range(len(source)))
    )


EXPECTED = sorted((x.tobytes(), int(y)) for x, y in zip(PIXELS, LABELS, strict=True))


def arrays(folder: Path, images: Any = PIXELS, labels: Any = LABELS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    return folder


def files(folder: Path, numbers: Any = range(40)) -> Path:
    for i in numbers:
        (folder / f"class {LABELS[i]}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[i]).save(folder / f"class {LABELS[i]}" / f"{i}.png")
    return folder


@pytest.mark.parametrize("form", [arrays, files])
def test_pictures_are_split_once(form: Any, tmp_path: Path) -> None:
    one, two = (load_images(form(tmp_path / name), validation_share=0.2).parts for name in "ab")
    assert elements(one["train"]) == elements(two["train"])
    assert len(one["validation"]) == 8
    assert sorted(elements(one["train"]) + elements(one["validation"])) == EXPECTED


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_parts_that_are_there_are_kept(name: str, tmp_path: Path) -> None:
    files(tmp_path / "train", range(30))
    files(tmp_path / name, range(30, 40))
    parts = load_images(tmp_path).parts
    assert [len(parts[part]) for part in ("train", "validation")] == [30, 10]


def cifar(folder: Path, names: dict[str, int], labels: int) -> np.ndarray:
    """Records as their authors describe them: labels, then red, green and blue, row by row."""
    pixels = RNG.integers(0, 256, (sum(names.values()), 32, 32, 3), np.uint8)
    at = 0
    for name, count in names.items():
        records = b""
        for x in pixels[at : at + count]:
            records += bytes([9] * (labels - 1) + [x[0, 0, 0] % 10])
            records += x[..., 0].tobytes() + x[..., 1].tobytes() + x[..., 2].tobytes()
        (folder / name).write_bytes(records)
        at += count
    return pixels


@pytest.mark.parametrize(
    ("names", "labels"),
    [({"data_batch_1.bin": 3, "data_batch_2.bin": 4, "test_batch.bin": 2}, 1),
     ({"train.bin": 7, "test.bin": 2}, 2)],
)  # fmt: skip
def test_cifar(names: dict[str, int], labels: int, tmp_path: Path) -> None:
    pixels = cifar(tmp_path, names, labels)
    parts = load_images(tmp_path).parts
    for part, expected in (("train", pixels[:7]), ("validation", pixels[7:])):
        assert len(parts[part]) == len(expected)
        for i, x in enumerate(expected):
            np.testing.assert_array_equal(parts[part][i]["image"], x)
            assert parts[part][i]["label"] == x[0, 0, 0] % 10
    with (tmp_path / next(iter(names))).open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="is not a CIFAR file, or is truncated"):
        load_images(tmp_path)


def test_grey_pictures_and_a_class_for_each_pixel(tmp_path: Path) -> None:
    masks = RNG.integers(0, 2, PIXELS.shape[:3])
    parts = load_images(arrays(tmp_path, PIXELS[..., 0], masks)).parts
    element = parts["train"][0]
    assert element["image"].shape == (6, 5, 1)
    assert element["label"].shape == (6, 5)
    grey = load_images(files(tmp_path / "files"), channels=1).parts["train"][0]["image"]
    assert grey.shape == (6, 5, 1)


def test_pictures_are_brought_to_a_size(tmp_path: Path) -> None:
    folder = files(tmp_path)
    Image.new("RGB", (9, 9)).save(folder / "class 0" / "z.png")
    sized = load_images(folder, size=(4, 8)).parts
    assert {sized[part][i]["image"].shape for part in sized for i in range(len(sized[part]))} == {
        (8, 4, 3)
    }
    # At once, and not when it is read in the middle of an epoch.
    with pytest.raises(
        InputError, match=r"png has \(\d, \d\) pixels, but others have .*: give --resize"
    ):
        load_images(folder)


RAMP = np.arange(30, dtype=np.uint8).reshape(6, 5) * 8
COLOURS = np.stack([RAMP] * 3, axis=2)
WIDE = 257 * RAMP.astype(np.uint16)  # the same of all that 16 bits can say


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """Red, green and blue of 16 bits, as the standard of PNG has them; Pillow writes none."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    height, width, _ = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2"))
    chunks = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png(pixels: np.ndarray, mode: str = "", **options: Any) -> bytes:
    picture, file = Image.fromarray(pixels), io.BytesIO()
    (picture.convert(mode) if mode else picture).save(file, "png", **options)
    return file.getvalue()


def opacity(least: int) -> np.ndarray:
    alpha = np.full_like(RAMP, 255)
    alpha[-1, -1] = least
    return np.concatenate([COLOURS, alpha[..., None]], axis=2)


SAME = {
    "grey": png(RAMP),
    "grey of 16 bits": png(WIDE),
    "16 bits": png_of_16_bits(np.stack([WIDE] * 3, axis=2)),
    "palette": png(RAMP, "P"),
    "opaque": png(opacity(255)),
    "grey and opaque": png(opacity(255), "LA"),
    "portable grey of 16 bits": b"P5 5 6 65535\n" + WIDE.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_picture_in_each_form(form: str, channels: int, tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "class 0" / "same.png").write_bytes(SAME[form])
    pictures = [x for part in load_images(tmp_path, channels=channels).parts.values() for x in part]
    expected = COLOURS[..., :channels]
    assert sum(np.array_equal(picture["image"], expected) for picture in pictures) == 1


UNCLEAR = {
    "transparent": (png(opacity(254)), "has transparent pixels: draw it on a background"),
    "one colour of a palette": (png(RAMP, "P", transparency=8), "has transparent pixels"),
    "floats": (b"Pf\n5 6\n-1\n" + RAMP.astype("<f4").tobytes(), "not 8 or 16 bits"),
    "cut": (png(COLOURS)[:-30], "cannot be read as a picture"),
    "another bit": (png(COLOURS).replace(b"IDAT", b"IDAU"), "cannot be read as a picture"),
}


@pytest.mark.parametrize("form", UNCLEAR)
def test_pictures_that_are_not_clear_are_one_line(form: str, tmp_path: Path) -> None:
    files(tmp_path)
    content, complaint = UNCLEAR[form]
    (tmp_path / "class 0" / "odd.png").write_bytes(content)
    with pytest.raises(InputError, match=f"odd.png .*{complaint}") as caught:
        [picture for part in load_images(tmp_path).parts.values() for picture in part]
    assert "\n" not in str(caught.value)


def test_folders_that_have_nothing_to_tell_apart(tmp_path: Path) -> None:
    for name, kinds in (("one", ["a"]), ("other empty", ["a", "b"])):
        for kind in kinds:
            (tmp_path / name / kind).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(PIXELS[i]).save(tmp_path / name / "a" / f"{i}.png")
        with pytest.raises(InputError, match=f"the training part of .*{name} has only one class"):
            load_images(tmp_path / name)
    with pytest.raises(InputError, match=r"the training part of .* has only one class"):
        load_images(arrays(tmp_path / "sevens", labels=np.full(40, 7)))


def test_parts_of_other_names_are_no_classes(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        files(tmp_path / part)
    with pytest.raises(InputError, match=r"data are named train and validation, val or test"):
        load_images(tmp_path)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_part_without_pictures_is_refused(part: str, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        some = slice(0 if name == part else None)
        arrays(tmp_path / name, PIXELS[some], LABELS[some])
    with pytest.raises(InputError, match=f"{part} holds no pictures"):
        load_images(tmp_path)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "floats": (PIXELS / 255, LABELS, "images of .* are float64 .*, but must be uint8"),
    "no side": (PIXELS[:, :0], LABELS, r"\(40, 0, 5, 3\), but must be uint8 \[count"),
    "no channel": (PIXELS[..., :0], LABELS, r"\(40, 6, 5, 0\), but must be uint8 \[count"),
    "none": (PIXELS[:0], LABELS[:0], "holds no pictures"),
    "flat": (PIXELS[:, 0, 0], LABELS, r"\(40, 3\), but must be uint8 \[count"),
    "counts": (PIXELS, LABELS[:-1], r"labels of .* are int64 \(39,\), but must be integers"),
    "fractions": (PIXELS, LABELS / 2, "labels of .* are float64"),
    "one": (PIXELS[:1], LABELS[:1], "the training part of .* has only one class"),
    "objects": (np.array([{}, {}]), LABELS, r"images.npy cannot be read .*Python objects in dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arrays_are_refused(case: str, tmp_path: Path) -> None:
    images, labels, complaint = REFUSED[case]
    with pytest.raises(InputError, match=complaint) as caught:
        load_images(arrays(tmp_path, images, labels))
    assert "\n" not in str(caught.value)


def test_damage_is_one_line(tmp_path: Path) -> None:
    folder = arrays(tmp_path / "arrays")
    path = folder / "images.npy"
    for size in (len(path.read_bytes()) - 1, 20, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(InputError, match=r"images.npy cannot be read as a NumPy array"):
            load_images(folder)
    (tmp_path / "files/a").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no pictures: give it a folder of pictures per"):
        load_images(tmp_path / "files")
    (tmp_path / "files/a/x.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"x.png cannot be read as a picture: cannot"):
        load_images(tmp_path / "files")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({}))
    with pytest.raises(InputError, match="holds pickles, which can run any code"):
        load_images(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        load_images(tmp_path / "missing")


def test_augmented_pictures_are_moved_and_mirrored_by_the_seed() -> None:
    image = np.arange(1, 31, dtype=np.uint8).reshape(6, 5, 1)
    same = grain.MapDataset.source([{"image": image, "label": np.asarray(3)}]).repeat(400)
    one, two, other = (augmented(same, seed, pad=2) for seed in (0, 0, 1))
    views = [one[i]["image"].tobytes() for i in range(400)]
    assert views == [two[i]["image"].tobytes() for i in range(400)]
    assert views != [other[i]["image"].tobytes() for i in range(400)]
    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)])
    all_views = {
        padded[a : a + 6, b : b + 5][:, ::way].tobytes()
        for a in range(5) for b in range(5) for way in (1, -1)
    }  # fmt: skip
    assert set(views) == all_views
    assert one[7]["label"] == 3


def test_the_classes_of_pixels_are_moved_with_them() -> None:
    """A class is told from the pixel that has it, so that no other reference is needed."""
    image = np.random.default_rng(0).permutation(30).astype(np.uint8).reshape(6, 5, 1)
    classes = lambda pixels: (pixels[..., 0] // 7).astype(np.int32)
    same = grain.MapDataset.source([{"image": image, "label": classes(image)}]).repeat(400)
    views = augmented(same, seed=0, pad=2)
    around = np.pad(image, [(2, 2), (2, 2), (0, 0)], "symmetric")
    expected = {
        around[a : a + 6, b : b + 5][:, ::way].tobytes()
        for a in range(5) for b in range(5) for way in (1, -1)
    }  # fmt: skip
    assert {view["image"].tobytes() for view in views} == expected
    for view in views:
        np.testing.assert_array_equal(view["label"], classes(view["image"]))
        assert view["label"].dtype == np.int32


def test_augmentation_handles_images_smaller_than_the_shift() -> None:
    image = np.full((1, 2, 1), 3, np.uint8)
    same = grain.MapDataset.source([{"image": image, "label": np.ones((1, 2), np.int32)}])
    for view in augmented(same.repeat(40), seed=0):
        assert (view["image"] == 3).all()
        assert (view["label"] == 1).all()
