"""Pictures of each form: what they are, which part they are in, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from PIL import Image

from models.data.images import augmented, load_images
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
    one, two = (load_images(form(tmp_path / name), held=0.2).parts for name in "ab")
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
    with pytest.raises(InputError, match="is no file of CIFAR, or was cut"):
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
    parts = load_images(folder).parts
    with pytest.raises(InputError, match=r"z.png has \(9, 9\) pixels, and others \(5, 6\): give"):
        [elements(parts[part]) for part in parts]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "floats": (PIXELS / 255, LABELS, "images of .* are float64 .*, and must be uint8"),
    "flat": (PIXELS[:, 0, 0], LABELS, r"\(40, 3\), and must be uint8 \[count"),
    "counts": (PIXELS, LABELS[:-1], r"labels of .* are int64 \(39,\), and must be whole"),
    "fractions": (PIXELS, LABELS / 2, "labels of .* are float64"),
    "one": (PIXELS[:1], LABELS[:1], "there must be two elements to split, and there are 1"),
    "objects": (np.array([{}, {}]), LABELS, r"images.npy is no array .*Python objects in dtype"),
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
        with pytest.raises(InputError, match=r"images.npy is no array of NumPy that can be read"):
            load_images(folder)
    (tmp_path / "files/a").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no pictures in folders of their classes"):
        load_images(tmp_path / "files")
    (tmp_path / "files/a/x.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"x.png is no picture: cannot identify"):
        load_images(tmp_path / "files")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({}))
    with pytest.raises(InputError, match="holds pickles, which may run any program"):
        load_images(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        load_images(tmp_path / "missing")


def test_augmented_pictures_are_moved_and_mirrored_by_the_seed() -> None:
    image = np.arange(1, 31, dtype=np.uint8).reshape(6, 5, 1)
    same = grain.MapDataset.source([{"image": image, "label": 3}]).repeat(400)
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
