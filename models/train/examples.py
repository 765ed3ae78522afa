"""The base class of runs on pictures and on series."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from models.data.batches import Share, Source, batches, mixed, spread
from models.data.examples import Examples
from models.errors import InputError
from models.settings import setting
from models.train.config import RunConfig

Run = TypeVar("Run", bound="ExamplesRun")
# Number of generated examples.
GENERATED_COUNT = 50_000


@dataclasses.dataclass(frozen=True)
class ExamplesRun(RunConfig):
    """A run on elements (examples with their targets) that all have the same shapes."""

    validation_share: float = setting(
        0.05, "Share of the data for validation, if the data has no part of its own for it.",
        above=0, most=0.5, change="never",
    )  # fmt: skip

    @abc.abstractmethod
    def element(self) -> Any:
        """Return the types of an element."""

    def batch_type(self) -> Any:
        """Return the types of the arrays `[accumulate, batch, ...]` that a step reads."""
        several = (self.accumulate, self.batch)
        return jax.tree.map(lambda x: x.update(shape=(*several, *x.shape)), self.element())

    def path(self) -> Path | None:
        """Return the path of the data; None if it is generated.

        Raises:
          InputError: there are several paths, or the run's folder is inside the data.
        """
        if not self.data:
            return None
        path, *others = map(Path, self.data)
        if others:
            raise InputError(f"--data is given {len(self.data)} times: give one path of {self.on}")
        if path.resolve() in (self.out.resolve(), *self.out.resolve().parents):
            raise InputError(f"--out {self.out} is inside --data {path}: choose another --out")
        return path

    def batches(self, data: Examples, share: Share, sharding: Sharding
                ) -> grain.DatasetIterator[Any]:  # fmt: skip
        """Iterate without end over batches of elements in shuffled order."""
        whole = self.changed(mixed([data.parts["train"]], [1.0], self.seed))
        return batches(
            whole, batch=self.batch, slices=self.accumulate, share=share, sharding=sharding
        )

    def changed(self, elements: grain.MapDataset[Any]) -> Source:
        """Apply data augmentation, if there is any."""
        return elements

    def validation(self, data: Examples) -> list[Any]:
        """Return batches of elements that are evenly spaced over the validation part."""
        return spread(data.parts["validation"], batch=self.batch, count=self.validation_examples)

    def checked(self, data: Examples) -> Examples:
        """Return the data; raise an `InputError` if its elements do not suit the model."""
        wanted = self.element()
        describe = lambda tree: " and ".join(
            f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(tree)
        )
        for part in data.parts:
            if (element := data.element(part)) != wanted:
                raise InputError(
                    f"{self.on} of {data.name} for {part} are {describe(element)}, but the model"
                    f" reads {describe(wanted)}"
                )
        return data


def means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over batches of equal size."""
    return {name: float(np.mean([one[name] for one in metrics])) for name in metrics[0]}


def resized(run: Run, sizes: Mapping[str, int], fixed: Collection[str]) -> Run:
    """Return the run with new sizes of its model.

    Sizes that the model does not have, and sizes in `fixed`, are ignored.
    """
    names = {field.name for field in dataclasses.fields(run.model)}
    new = {name: size for name, size in sizes.items() if name in names and name not in fixed}
    try:
        return dataclasses.replace(run, model=dataclasses.replace(run.model, **new))
    except ValueError as error:
        raise InputError(str(error)) from None
