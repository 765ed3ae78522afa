"""Probabilistic programs: densities, variational bounds, and filters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.unmodified.foreign.parts import Made, Program, normal
from experiments.unmodified.programs import KEY, tokens
from experiments.unmodified.sources import definitions, package


def numpyro(folder: Path) -> Any:
    """NumPyro, of which a density and a variational bound are used."""
    return package(folder / "numpyro", "numpyro")


def density(folder: Path, model: Any, *args: Any, **options: Any) -> Made:
    """The negative log density of a model, in unconstrained parameters."""
    infer = package(folder / "numpyro", "numpyro.infer.util")
    found = infer.initialize_model(KEY, model, model_args=args, model_kwargs=options,
                                   dynamic_args=False)  # fmt: skip
    return lambda params: found.potential_fn(params), (found.param_info.z,)


def regression(folder: Path) -> Made:
    """A Gaussian process, at 256 points."""
    numpyro(folder)
    model = definitions(folder / "numpyro/examples/gp.py", "kernel", "model").model
    return density(folder, model, normal(256), normal(256, seed=2))


def network(folder: Path) -> Made:
    """A Bayesian network of two layers, on 2048 examples."""
    numpyro(folder)
    model = definitions(folder / "numpyro/examples/bnn.py", "nonlin", "model").model
    return density(folder, model, normal(2048, 16), normal(2048, 1, seed=2), 32)


def hidden_markov(folder: Path) -> Made:
    """A hidden Markov model of tones, enumerated, over 16 sequences of 64 steps."""
    numpyro(folder)
    model = definitions(folder / "numpyro/examples/hmm_enum.py", "model_1").model_1
    tones = jax.random.bernoulli(KEY, 0.3, (16, 64, 24)).astype(jnp.float32)
    args = SimpleNamespace(hidden_dim=16)
    return density(folder, model, tones, jnp.full(16, 64), args)


def flow(folder: Path) -> Made:
    """Distrax's flow of splines, of four layers, on pictures of 8 by 8."""
    haiku = package(folder / "dm-haiku", "haiku")
    package(folder / "distrax", "distrax")
    names = ("Array", "PRNGKey", "Batch", "OptState", "make_conditioner", "make_flow_model")
    example = definitions(folder / "distrax/examples/flow.py", *names)
    make = partial(example.make_flow_model, num_layers=4, hidden_sizes=[128] * 2, num_bins=4)
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: make(event_shape=x.shape[1:]).log_prob(x))
    )
    data = jax.random.uniform(KEY, (64, 8, 8, 1))
    return lambda params, x: -model.apply(params, x).mean(), (model.init(KEY, data), data)


def kalman(folder: Path) -> Made:
    """The likelihood of a linear Gaussian model by a Kalman filter, for 64 sequences."""
    ssm = package(folder / "dynamax", "dynamax.linear_gaussian_ssm")
    model = ssm.LinearGaussianSSM(state_dim=8, emission_dim=4)
    params, _ = model.initialize(KEY)
    return (
        lambda params, ys: -jax.vmap(partial(model.marginal_log_prob, params))(ys).mean(),
        (params, normal(64, 64, 4)),
    )


def variational(folder: Path) -> Made:
    """JAX's example of variational inference, of a logistic regression, with 32 samples."""
    names = ("diag_gaussian_sample", "diag_gaussian_logpdf", "elbo", "batch_elbo")
    example = definitions(folder / "jax/examples/advi.py", *names)
    x, y = normal(4096, 32), tokens(4096, 1, 2)[:, 0]

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logprob = lambda w: jnp.sum(jax.nn.log_sigmoid((2 * y - 1) * (x @ w))) - jnp.sum(w**2)
        return -example.batch_elbo(logprob, key, params, 32)

    return loss, ((normal(32) / 8, jnp.zeros(32)), x, y, KEY)


PROGRAMS = {
    "Gaussian process": Program("pyro-ppl/numpyro", "examples/gp.py", regression),
    "Bayesian network": Program("pyro-ppl/numpyro", "examples/bnn.py", network),
    "hidden Markov model": Program("pyro-ppl/numpyro", "examples/hmm_enum.py", hidden_markov),
    "Distrax flow": Program("google-deepmind/distrax", "examples/flow.py", flow),
    "Kalman filter": Program("probml/dynamax", "dynamax/linear_gaussian_ssm", kalman),
    "JAX advi": Program("jax-ml/jax", "examples/advi.py", variational),
}
