"""Graph networks: messages over edges, attention over edges, and equivariant features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.unmodified.foreign.parts import Made, Program, classified, labels, normal
from experiments.unmodified.programs import KEY, tokens
from experiments.unmodified.sources import definitions, module, package


def graphs(folder: Path, count: int, nodes: int, edges: int, features: int) -> Any:
    """A batch of random graphs, each of as many nodes and edges, as Jraph keeps it."""
    jraph = package(folder / "jraph", "jraph")
    starts = jnp.repeat(jnp.arange(count) * nodes, edges)
    ends = tokens(2, count * edges, nodes) + starts
    return jraph.GraphsTuple(
        nodes=normal(count * nodes, features), edges=normal(count * edges, features),
        globals=jnp.ones((count, 1)), senders=ends[0], receivers=ends[1],
        n_node=jnp.full(count, nodes), n_edge=jnp.full(count, edges),
    )  # fmt: skip


def molecules(folder: Path) -> Made:
    """Flax's graph network of molecules, on 32 of them, with dropout."""
    graph = graphs(folder, 32, 24, 52, 9)
    here = folder / "flax/examples/ogbg_molpcba"
    model = module(here / "models.py").GraphNet(
        latent_size=128, num_mlp_layers=2, message_passing_steps=3, output_globals_size=64,
        dropout_rate=0.1, deterministic=False,
    )  # fmt: skip
    train = definitions(here / "train.py", "binary_cross_entropy_with_mask")
    targets = jax.random.bernoulli(KEY, 0.3, (32, 64)).astype(jnp.float32)

    def loss(params: Any, graph: Any, targets: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(params, graph, rngs={"dropout": key}).globals
        every = jnp.ones_like(targets, bool)
        return train.binary_cross_entropy_with_mask(
            logits=logits, labels=targets, mask=every
        ).mean()

    params = model.init({"params": KEY, "dropout": KEY}, graph)
    return loss, (params, graph, targets, KEY)


def dense_attention(folder: Path) -> Made:
    """A graph attention network over a mask of all pairs of 512 nodes, with dropout."""
    haiku = package(folder / "dm-haiku", "haiku")
    gat = module(folder / "gat/gat.py")
    net = haiku.transform(lambda x, mask: gat.GAT(2, [8, 1], [8, 7], dropout=0.6)(x, mask)[0])
    near = jax.random.bernoulli(KEY, 0.02, (512, 512)) | jnp.eye(512, dtype=bool)
    nodes, mask = normal(512, 256), jnp.where(near, 0.0, -1e9)
    apply = lambda params, x, mask, key: net.apply(params, key, x, mask)
    return classified(apply, net.init(KEY, nodes, mask), nodes, labels(512, 7), mask, KEY)


def sparse_attention(folder: Path) -> Made:
    """Jraph's graph attention: two layers over 8192 edges of 1024 nodes."""
    jraph = package(folder / "jraph", "jraph")
    graph = graphs(folder, 1, 1024, 8192, 32)
    graph = graph._replace(edges=None)

    def apply(params: Any, graph: Any) -> jax.Array:
        for query, score in params:
            net = jraph.GAT(
                lambda x, query=query: x @ query,
                lambda sent, got, _, score=score: jax.nn.leaky_relu(
                    jnp.concatenate([sent, got], -1) @ score
                ),
                jax.nn.elu,
            )
            graph = net(graph)
        return graph.nodes

    layers = [(normal(32, 64, seed=n) / 6, normal(128, 1, seed=n + 9) / 12) for n in (2, 3)]
    layers[1] = (normal(64, 64, seed=5) / 8, layers[1][1])
    return classified(apply, layers, graph, labels(1024, 64))


def tetris(folder: Path) -> Made:
    """The equivariant network of e3nn's example, on 16 copies of its eight shapes."""
    jraph = package(folder / "jraph", "jraph")
    package(folder / "e3nn-jax", "e3nn_jax")
    example = module(folder / "e3nn-jax/examples/tetris_point.py")
    graph = jraph.batch([example.tetris()] * 16)
    model = example.Model()
    return classified(model.apply, model.init(KEY, graph), graph, graph.globals)


PROGRAMS = {
    "Flax graph network": Program("google/flax", "examples/ogbg_molpcba", molecules),
    "graph attention, dense": Program("lucabeetz/gat", "gat.py", dense_attention),
    "graph attention, sparse": Program("google-deepmind/jraph", "jraph/_src/models.py",
                                       sparse_attention),
    "e3nn tetris": Program("e3nn/e3nn-jax", "examples/tetris_point.py", tetris),
}  # fmt: skip
