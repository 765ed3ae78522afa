"""Runs on time series: prediction of the next moment (time step) from the moments before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from models.data.examples import Examples
from models.data.series import features, generated_series, load_series
from models.data.synthetic import SyntheticSeries
from models.nets.ode import ODEConfig
from models.settings import setting
from models.train.config import RunConfig, Validation
from models.train.examples import GENERATED_COUNT, ExamplesRun, means, resized


@dataclasses.dataclass(frozen=True)
class SeriesRun(ExamplesRun):
    """A run of an LSTM, a GRU or a neural ODE."""

    on: ClassVar[str] = "series"
    unit: ClassVar[str] = "moments"
    length_name: ClassVar[str] = "window"

    window: int = setting(
        64, "Number of moments (time steps of the series) in an example.", least=1, change="never"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, ODEConfig) and not self.model.output_layer:
            raise ValueError(
                "the model needs an output layer to predict the next moment: give --output-layer"
            )

    @property
    def length(self) -> int:
        """Number of moments in an example."""
        return self.window

    def with_length(self, length: int) -> RunConfig:
        """Return the same run with windows of `length` moments."""
        return dataclasses.replace(self, window=length)

    @property
    def features(self) -> int:
        """Number of features of each moment."""
        return self.model.width if isinstance(self.model, ODEConfig) else self.model.features

    def fit_to_data(self, fixed: Collection[str]) -> RunConfig:
        """Return the run with the number of features of its series."""
        if (path := self.path()) is None:
            return self
        setting_name = "width" if isinstance(self.model, ODEConfig) else "features"
        return resized(self, {setting_name: features(path)}, fixed)

    def element(self) -> jax.ShapeDtypeStruct:
        """Return the type of a window plus the moment after it."""
        return jax.ShapeDtypeStruct((self.window + 1, self.features), jnp.float32)

    def reads(self) -> jax.ShapeDtypeStruct:
        """Return the type of a window."""
        return jax.ShapeDtypeStruct((self.window, self.features), jnp.float32)

    def load(self) -> Examples:
        """Load the series of a file, or generate them from the seed."""
        return self.checked(self._read())

    def _read(self) -> Examples:
        if (path := self.path()) is not None:
            return load_series(path, self.window, validation_share=self.validation_share)
        series = SyntheticSeries(self.seed, GENERATED_COUNT, self.window + 1, self.features)
        return generated_series(series, self.validation_share)

    def validation_result(self, data: Examples, metrics: Sequence[dict[str, float]],
                          batches: Sequence[Any]) -> Validation:  # fmt: skip
        """Compute the mean squared error."""
        numbers = means(metrics)
        return Validation({self.metric: numbers["loss"]}, self.metrics_text(numbers))

    def metrics_text(self, metrics: dict[str, float]) -> str:
        """Format the mean squared error."""
        return f"loss {metrics['loss']:.4g}"
