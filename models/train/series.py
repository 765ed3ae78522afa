"""Runs on series: what comes next."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from models.data.examples import Examples
from models.data.series import features, load_series, made_series
from models.data.synthetic import SyntheticSeries
from models.nets.ode import ODEConfig
from models.settings import setting
from models.train.config import Judgement, RunConfig
from models.train.examples import MADE, ExamplesRun, means, resized


@dataclasses.dataclass(frozen=True)
class SeriesRun(ExamplesRun):
    """A run of an LSTM, a GRU or a neural ODE."""

    on: ClassVar[str] = "series"
    unit: ClassVar[str] = "moments"
    length_name: ClassVar[str] = "window"

    window: int = setting(64, "Moments that a model reads at once.", least=1, change="never")

    def __post_init__(self) -> None:
        if not isinstance(self.model, ODEConfig) and not self.model.head:
            raise ValueError("there is no head that says of a state what comes next: give --head")

    @property
    def length(self) -> int:
        """Moments that are read in an example."""
        return self.window

    def with_length(self, length: int) -> RunConfig:
        """The same with windows of so many moments."""
        return dataclasses.replace(self, window=length)

    @property
    def features(self) -> int:
        """Of each moment."""
        return self.model.width if isinstance(self.model, ODEConfig) else self.model.inputs

    def fitted(self, said: Collection[str]) -> RunConfig:
        """The run whose model has the features of its series."""
        if (path := self.path()) is None:
            return self
        of = "width" if isinstance(self.model, ODEConfig) else "inputs"
        return resized(self, {of: features(path)}, said)

    def element(self) -> jax.ShapeDtypeStruct:
        """A window, and the moment after it."""
        return jax.ShapeDtypeStruct((self.window + 1, self.features), jnp.float32)

    def reads(self) -> jax.ShapeDtypeStruct:
        """A window."""
        return jax.ShapeDtypeStruct((self.window, self.features), jnp.float32)

    def load(self) -> Examples:
        """The series of a file, or those that the seed makes."""
        return self.checked(self._read())

    def _read(self) -> Examples:
        if (path := self.path()) is not None:
            return load_series(path, self.window, held=self.held)
        made = SyntheticSeries(self.seed, MADE, self.window + 1, self.features)
        return made_series(made, self.held)

    def judgement(self, data: Examples, found: Sequence[dict[str, float]], batches: Sequence[Any]
                  ) -> Judgement:  # fmt: skip
        """The mean square of what is wrong."""
        numbers = means(found)
        return Judgement({self.metric: numbers["loss"]}, self.said(numbers))

    def said(self, metrics: dict[str, float]) -> str:
        """The mean square of what is wrong."""
        return f"loss {metrics['loss']:.4g}"
