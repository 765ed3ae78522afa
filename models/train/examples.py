"""What runs on pictures and on series share: examples that are judged by their mean."""

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
# Of what the seed makes.
MADE = 50_000


@dataclasses.dataclass(frozen=True)
class ExamplesRun(RunConfig):
    """A run on elements of one form."""

    held: float = setting(
        0.05, "Share of the data for validation, where it has no part for that.", above=0,
        most=0.5, change="never",
    )  # fmt: skip

    @abc.abstractmethod
    def element(self) -> Any:
        """Types of an element."""

    def batch_type(self) -> Any:
        """Types of the arrays of elements, `[accumulate, batch, ...]`."""
        several = (self.accumulate, self.batch)
        return jax.tree.map(lambda x: x.update(shape=(*several, *x.shape)), self.element())

    def path(self) -> Path | None:
        """Where the data is; None for what the seed makes.

        Raises:
          InputError: there are several, or the folder of the run lies in it.
        """
        if not self.data:
            return None
        path, *others = map(Path, self.data)
        if others:
            raise InputError(f"--data is given {len(self.data)} times: {self.on} are of one path")
        if path.resolve() in (self.out.resolve(), *self.out.resolve().parents):
            raise InputError(f"--out {self.out} lies in --data {path}: choose another --out")
        return path

    def batches(self, data: Examples, share: Share, sharding: Sharding
                ) -> grain.DatasetIterator[Any]:  # fmt: skip
        """Elements in a shuffled order."""
        whole = self.changed(mixed([data.parts["train"]], [1.0], self.seed))
        return batches(
            whole, batch=self.batch, slices=self.accumulate, share=share, sharding=sharding
        )

    def changed(self, elements: grain.MapDataset[Any]) -> Source:
        """Elements as they are trained on."""
        return elements

    def validation(self, data: Examples) -> list[Any]:
        """Elements of the part for validation, spread evenly over it."""
        return spread(data.parts["validation"], batch=self.batch, count=self.eval_windows)

    def checked(self, data: Examples) -> Examples:
        """The data, if its elements are of the form that the model takes."""
        wanted = self.element()
        forms = lambda tree: " and ".join(
            f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(tree)
        )
        for part in data.parts:
            if (there := data.element(part)) != wanted:
                raise InputError(
                    f"{self.on} of {data.name} for {part} are {forms(there)}, and the model takes"
                    f" {forms(wanted)}"
                )
        return data


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over batches of one size."""
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def resized(run: Run, sizes: Mapping[str, int], said: Collection[str]) -> Run:
    """The run whose model has these sizes, of those that it has and that are not `said`."""
    names = {field.name for field in dataclasses.fields(run.model)}
    new = {name: size for name, size in sizes.items() if name in names and name not in said}
    try:
        return dataclasses.replace(run, model=dataclasses.replace(run.model, **new))
    except ValueError as error:
        raise InputError(str(error)) from None
