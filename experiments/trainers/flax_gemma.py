"""Flax's examples/gemma (NNX) on random text, for a few steps."""

import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]) / "flax/examples/gemma"))
import train
from configs import tiny

from experiments.trainers.printed import print_metrics
from experiments.trainers.random_text import mock_lm1b

print_metrics()
# With JAX 0.10.2 the sampler, which decodes examples of text, fails on the trainer's own mesh.
train.sampler_lib.Sampler.__call__ = lambda *args, **kwargs: types.SimpleNamespace(text="")
config = tiny.get_config().replace(
    max_corpus_chars=10_000, vocab_size=64, per_device_batch_size=8, eval_per_device_batch_size=8,
    num_train_steps=int(sys.argv[2]), num_eval_steps=1, num_predict_steps=2, prompts=("a b",),
    max_target_length=64, max_eval_target_length=64, warmup_steps=2, eval_every_steps=1,
    save_checkpoints=False, restore_checkpoints=False, use_bfloat16=False,
    input_pipeline_type="tf",
)  # fmt: skip
with mock_lm1b():
    train.train_and_evaluate(config, tempfile.mkdtemp())
