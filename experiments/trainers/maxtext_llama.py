"""MaxText's own entry for training, on synthetic data: a Llama of scanned layers, a few steps."""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import maxtext

POLICY = os.environ.get("REMAT_POLICY", "minimal")
package = Path(maxtext.__file__).parent
folder = Path(tempfile.mkdtemp())
settings = {
    "run_name": "t", "base_output_directory": folder / "out", "metrics_file": folder / "metrics",
    "hardware": "cpu", "dataset_type": "synthetic", "enable_checkpointing": False,
    "attention": "dot_product", "skip_jax_distributed_system": True, "log_config": False,
    "enable_goodput_recording": False, "steps": sys.argv[2], "remat_policy": POLICY,
    "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_decoder_layers": 12,
    "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 16, "max_target_length": 128,
    "per_device_batch_size": 4, "vocab_size": 512, "dtype": "float32", "weight_dtype": "float32",
}  # fmt: skip
sys.argv = [
    "train", str(package / "configs" / "base.yml"), *(f"{k}={v}" for k, v in settings.items())
]  # fmt: skip
try:
    runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)
finally:
    for line in (folder / "metrics").read_text().splitlines():
        metrics = json.loads(line)
        print("loss", int(metrics["step"]), metrics["learning/loss"], flush=True)
