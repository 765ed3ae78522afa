"""Flax's examples/lm1b (Linen) on random text, for a few steps."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]) / "flax/examples/lm1b"))
import train
from configs import default

from experiments.trainers.printed import print_metrics
from experiments.trainers.random_text import mock_lm1b

print_metrics()
config = default.get_config()
config.update(
    max_corpus_chars=10_000, vocab_size=64, per_device_batch_size=16,
    num_train_steps=int(sys.argv[2]), num_eval_steps=1, num_predict_steps=1,
    num_layers=2, qkv_dim=128, emb_dim=128, mlp_dim=512, num_heads=2, max_target_length=64,
    max_eval_target_length=32, max_predict_length=8, eval_every_steps=1, warmup_steps=2,
    use_bfloat16=False,
)  # fmt: skip
with mock_lm1b():
    train.train_and_evaluate(config, tempfile.mkdtemp())
