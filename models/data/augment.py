"""Pictures that are moved and mirrored by chance, and with them the classes of their pixels."""

from __future__ import annotations

import grain
import numpy as np

from models.data.picture import Picture


def augmented(pictures: grain.MapDataset[Picture], seed: int, pad: int = 4
              ) -> grain.MapDataset[Picture]:  # fmt: skip
    """Pictures moved by up to `pad` pixels and mirrored, by chance, as is usual for CIFAR.

    Which way depends on the seed and the number of the element. What comes in at a side is black.
    Where each pixel has a class, both are moved and mirrored alike, and what comes in is the
    picture reflected, which has the classes of what it reflects.
    """

    def change(picture: Picture, rng: np.random.Generator) -> Picture:
        image, label = picture["image"], picture["label"]
        height, width = image.shape[:2]
        top, left = rng.integers(0, 2 * pad + 1, size=2)
        mirrored = rng.integers(2)

        def seen(x: np.ndarray) -> np.ndarray:
            around = [(pad, pad), (pad, pad), *[(0, 0)] * (x.ndim - 2)]
            x = np.pad(x, around, "symmetric") if label.ndim else np.pad(x, around)
            x = x[top : top + height, left : left + width]
            return np.ascontiguousarray(x[:, ::-1] if mirrored else x)

        return {"image": seen(image), "label": seen(label) if label.ndim else label}

    return pictures.seed(seed).random_map(change)
