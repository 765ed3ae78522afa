"""All programs, by field, and the commits of the repositories that they are taken from."""

from __future__ import annotations

from experiments.unmodified.foreign import (
    control,
    graphs,
    language,
    named,
    optimization,
    physics,
    probability,
    states,
    vision,
)
from experiments.unmodified.foreign.parts import Program

PROGRAMS: dict[str, Program] = (
    language.PROGRAMS
    | vision.PROGRAMS
    | graphs.PROGRAMS
    | states.PROGRAMS
    | physics.PROGRAMS
    | probability.PROGRAMS
    | control.PROGRAMS
    | optimization.PROGRAMS
    | named.PROGRAMS
)

# A checkout is a folder with the second half of the repository's name.
COMMITS = {
    "e3nn/e3nn-jax": "04e761c8e9a4",
    "google-deepmind/distrax": "f51bffcf9094",
    "google-deepmind/dm-haiku": "f4d858a5cbb2",
    "google-deepmind/jraph": "51f5990104f7",
    "google-deepmind/optax": "2edbcbe2390d",
    "google-deepmind/penzai": "aac7808a3d12",
    "google-deepmind/recurrentgemma": "2efa84dac0e6",
    "google-deepmind/rlax": "4c5d25b26098",
    "google-research/maxim": "3c8265171ffc",
    "google-research/nested-transformer": "59c0d6aa1a05",
    "google-research/vision_transformer": "c6de1e5378c9",
    "google/flax": "18f8f311c275",
    "google/jax-cfd": "a1b5b51e982d",
    "google/jaxopt": "2de13bf01fd2",
    "ikostrikov/jaxrl": "4a9abaff1c91",
    "jax-md/jax-md": "a41c7d19f646",
    "jax-ml/bonsai": "36284254cf73",
    "jax-ml/jax": "cec06d116c05",
    "jenkspt/gpt-jax": "f22a46e81e72",
    "lucabeetz/gat": "cea303ba2952",
    "lucidrains/PaLM-jax": "44a423160576",
    "lucidrains/progen": "3054b2973ce2",
    "mathisgerdes/continuous-flow-lft": "7b34521cea48",
    "NicolasZucchet/minimal-LRU": "bbd71b1104c3",
    "ott-jax/ott": "6aace50f673b",
    "patrick-kidger/diffrax": "5ea5fcb05058",
    "patrick-kidger/equinox": "9336d820b2ef",
    "probml/dynamax": "cfb005fa1867",
    "pyro-ppl/numpyro": "0b935d488056",
    "radarFudan/mamba-minimal-jax": "b76334404f7f",
    "srush/annotated-s4": "f19e2464990f",
}
