"""MaxText's own training step for some settings, built without running it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator
from typing import Any

import jax
import maxtext  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.layers import nnx_decoders  # pyright: ignore[reportMissingImports]
from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]

# A dense Llama of 12 scanned layers on one device: the activations dominate.
SETTINGS = {
    "run_name": "names", "hardware": "cpu", "dataset_type": "synthetic", "dtype": "float32",
    "enable_checkpointing": False, "attention": "dot_product", "log_config": False,
    "skip_jax_distributed_system": True, "enable_goodput_recording": False,
    "base_num_decoder_layers": 12, "base_emb_dim": 256, "base_mlp_dim": 1024, "head_dim": 64,
    "base_num_query_heads": 4, "base_num_kv_heads": 4, "max_target_length": 256,
    "per_device_batch_size": 16, "vocab_size": 512, "weight_dtype": "float32",
}  # fmt: skip


class Step:
    """MaxText's training step with some settings: its function, arguments and options of `jit`."""

    def __init__(self, **settings: Any) -> None:
        base = os.path.join(os.path.dirname(maxtext.__file__), "configs/base.yml")
        folder = {"base_output_directory": tempfile.gettempdir()}
        given = SETTINGS | folder | settings
        self.config: Any = pyconfig.initialize(
            [sys.argv[0], base, *(f"{name}={value}" for name, value in given.items())]
        )
        self.mesh = Mesh(maxtext_utils.create_device_mesh(self.config), self.config.mesh_axes)
        self.args, _, shardings, _, model = train_compile.get_shaped_inputs(self.mesh, self.config)
        data = sharding.get_input_data_sharding(self.config, self.mesh)
        self.run, ins, outs, _, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, shardings, model, self.config, None
        )
        self.options = {"in_shardings": ins, "out_shardings": outs, "donate_argnums": donated}

    @contextlib.contextmanager
    def on_mesh(self) -> Generator[None]:
        """Enter MaxText's mesh and its rules for axes."""
        rules = train_compile.axis_rules(self.config.logical_axis_rules)
        with rules, jax.set_mesh(self.mesh):
            yield

    def compiled_bytes(self) -> int:
        """Return the bytes of the compiled step."""
        with self.on_mesh():
            compiled = jax.jit(self.run, **self.options).lower(*self.args).compile()
        sizes: Any = compiled.memory_analysis()
        ends = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return ends + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes

    def under(self, *args: Any, policy: Any) -> Any:
        """Run the step with a policy in its decoder layers."""
        decoder = nnx_decoders.NNXDecoder
        of_config = decoder.get_remat_policy
        decoder.get_remat_policy = lambda self: policy
        try:
            return self.run(*args)
        finally:
            decoder.get_remat_policy = of_config
