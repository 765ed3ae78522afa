"""Small runs of each kind on the command line, for tests of processes."""

from pathlib import Path

from tests.models.examples import MODELS, data
from tests.models.micro import FLAGS, TEXT

COMMON = [
    "--batch",
    "8",
    "--validation-share",
    "0.2",
    "--validation-examples",
    "8",
    "--warmup-steps",
    "4",
]
# Everything that depends on seed and step, or accumulates during the run.
RESNET20 = [
    "--preset",
    "resnet20",
    *COMMON,
    "--augment",
    "--ema-decay",
    "0.5",
    "--data",
    "pictures",
]
EACH = {
    "text": [*FLAGS, "--data", "text"],
    "resnet20": RESNET20,
    "resnet": [
        *RESNET20,
        "--stem-channels",
        "4",
        "--stage-channels",
        "4,8",
        "--stage-blocks",
        "1,1",
    ],
    "gru": [
        *["--preset", "gru", *COMMON, "--window", "12", "--width", "8", "--ema-decay", "0.5"],
        *["--data", "series.npy"],
    ],
}


def written(folder: Path) -> None:
    """Write the data of all runs."""
    (folder / "text").write_bytes(TEXT)
    for model in ("resnet", "gru"):
        data(folder, MODELS[model])
