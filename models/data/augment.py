"""Data augmentation: random shifts and mirror images of pictures and of their pixel labels."""

from __future__ import annotations

import grain
import numpy as np

from models.data.picture import Picture


def augmented(pictures: grain.MapDataset[Picture], seed: int, pad: int = 4
              ) -> grain.MapDataset[Picture]:  # fmt: skip
    """Shift each picture by up to `pad` pixels, and mirror half of them, as is usual for CIFAR.

    The change depends only on the seed and the index of the picture. Pixels that are shifted in
    from outside are black. If each pixel has a class, its label moves with it, and the pixels and
    classes that are shifted in are a reflection at the border.
    """

    def change(picture: Picture, rng: np.random.Generator) -> Picture:
        image, label = picture["image"], picture["label"]
        height, width = image.shape[:2]
        top, left = rng.integers(0, 2 * pad + 1, size=2)
        is_mirrored = rng.integers(2)

        def shifted(x: np.ndarray) -> np.ndarray:
            around = [(pad, pad), (pad, pad), *[(0, 0)] * (x.ndim - 2)]
            x = np.pad(x, around, "symmetric") if label.ndim else np.pad(x, around)
            x = x[top : top + height, left : left + width]
            return np.ascontiguousarray(x[:, ::-1] if is_mirrored else x)

        return {"image": shifted(image), "label": shifted(label) if label.ndim else label}

    return pictures.seed(seed).random_map(change)
