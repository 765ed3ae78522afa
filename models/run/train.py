"""Train a model: `python -m models train --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console

import xform
from models import program
from models.errors import InputError
from models.nets.huggingface import load
from models.nets.presets import abstract, parameter_count
from models.run.flags import Parser
from models.settings import parse_toml, replaced
from models.train.config import RunConfig
from models.train.device import memory_bytes
from models.train.display import Output
from models.train.fit import largest
from models.train.folder import CONFIG
from models.train.kinds import every_setting, of_model, of_preset, read_config, refuse_others
from models.train.loop import train
from models.train.mesh import begin_processes, check_batch, mesh_or_none
from models.train.planned import lowered_step, one_line, plan_of, policy_of, whole_step
from models.train.start import Origin, Resume
from xform.policies.budgets import bounds_peak

ABOUT = """Train a model on text, pictures or series with xform's reverse mode.

The preset names the model, and thereby the kind of data. Settings come from the preset, then from
the TOML file --config, then from flags. A resumed run starts from the settings in its folder. All
settings are written to config.toml in the folder of the run.
The text lists the settings of all kinds of models; a setting that a model lacks is refused.
Defaults are in parentheses; each preset has its own sizes.
"""
SIGNALLED = 128  # added to the number of a signal in the exit code


def parser() -> Parser:
    """Make the parser of the command."""
    flags = Parser(prog=f"{program.NAME} train", description=ABOUT)
    flags.add_argument(
        "--config", metavar="FILE", help="TOML file with settings, such as config.toml of a run"
    )
    flags.add_argument(
        "--from-huggingface",
        metavar="FOLDER",
        dest="origin",
        help="start from the GPT-2, Llama, Mixtral or Qwen 3 in this Hugging Face folder"
        " instead of --preset",
    )
    flags.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="address of the first process, in a run of several processes",
    )
    flags.add_argument(
        "--num-processes", type=int, metavar="N", help="number of processes of the run"
    )
    flags.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")
    flags.add_argument(
        "--resume", action="store_true", help="continue the run in --out from its last checkpoint"
    )
    flags.add_argument(
        "--resume-step",
        type=int,
        metavar="N",
        help="continue the run in --out from the checkpoint of this step",
    )
    flags.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help="settings whose values may differ from those of the resumed run",
    )
    flags.add_argument(
        "--dry-run",
        action="store_true",
        help="compile the training step, print its memory and exit; allocate nothing",
    )
    flags.add_argument(
        "--largest-batch",
        action="store_true",
        help="find the largest batches that fit in memory, by compiling, and exit",
    )
    flags.add_argument(
        "--target",
        metavar="DEVICE",
        help="device for --largest-batch and --dry-run,"
        " such as tpu:v5e:1x1 or gpu:h100; it need not be present",
    )
    flags.add_argument(
        "--capacity",
        metavar="BYTES",
        help="memory of each device for --largest-batch"
        " and --dry-run, such as 14GiB (default: all that the device has)",
    )
    flags.add_settings(*every_setting())
    return flags


def configured(given: dict[str, Any], resuming: bool, origin: Any = None) -> RunConfig:
    """Build the settings of a run.

    They come from the run's folder, the model or the preset, then from the TOML file, then from the
    flags. In a new run, sizes that only the preset sets are taken from the data instead, see
    `RunConfig.fit_to_data`.

    Args:
      given: the values of flags by name; the entry "config" is removed.
      resuming: whether to start from the settings in the run's folder.
      origin: the configuration of a loaded model, in place of a preset.

    Raises:
      InputError: a setting cannot be used, or there is no run to resume.
    """
    # The settings that are not taken from the data.
    fixed = {*given} if origin is None else {"vocab", *given}
    base = of_preset(given.get("preset", "tiny"))
    if origin is not None:
        base = of_model(origin)
    if resuming:
        out = Path(replaced(base, {k: given[k] for k in given.keys() & {"out"}}, True).out)
        if not (out / CONFIG).exists():
            raise InputError(
                f"no run to resume in {out}: it has no {CONFIG}; give the --out of a run"
            )
        base = read_config(_read_text(out / CONFIG), str(out / CONFIG))
        base = replaced(base, {"out": out})  # the file may be a copy from another folder
    if file := given.pop("config"):
        text = _read_text(Path(file))
        base, document = read_config(text, file, base), parse_toml(text, file)
        fixed |= {*document, *document.get("model", {})}
        if (preset := given.get("preset", base.preset)) != base.preset:
            raise InputError(
                f"--preset is {preset}, but {file} has the preset {base.preset}: remove one of them"
            )
    refuse_others(base, given)
    run = replaced(base, given, by_flag=True)
    return run if resuming else run.fit_to_data(fixed)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8: convert it") from None


def main(arguments: list[str]) -> int:
    """Train, and return the exit code: 0, or 128 plus the number of a signal."""
    given = parser().parse(arguments)
    begin_processes(
        *(given.pop(name) for name in ("coordinator_address", "num_processes", "process_id"))
    )
    console = Output(quiet=jax.process_index() > 0)
    step, finds_batch, is_dry_run = (
        given.pop(name) for name in ("resume_step", "largest_batch", "dry_run")
    )
    resuming = given.pop("resume") or step is not None
    override = [name for names in given.pop("override") for name in names.split(",")]
    target, capacity = given.pop("target"), given.pop("capacity")
    if (target or capacity) and not (finds_batch or is_dry_run):
        raise InputError(
            "--target and --capacity are for a device that may be absent: add --dry-run or"
            " --largest-batch. To train on another backend, set JAX_PLATFORMS"
        )
    origin = given.pop("origin")
    if origin and (resuming or "preset" in given):
        raise InputError(
            "--from-huggingface starts a new run of the model in its folder: leave out --preset,"
            " --resume and --resume-step"
        )
    loaded = load(origin) if origin else None
    run = configured(given, resuming, loaded and loaded.config)
    if run.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(run.compilation_cache))
    count = parameter_count(abstract(run.model))
    console.print(f"{run.preset}: {count:,} parameters, {run.amount()} per step")
    if finds_batch:
        return print_largest(run, target, capacity, console)
    check_batch(run.mesh, run.batch, run.length if run.unit == "tokens" else None)
    if is_dry_run:
        console.print(str(step_memory(run, target, capacity)))
        return 0
    resume = Resume(step, [name.replace("-", "_") for name in override]) if resuming else None
    initial = Origin(origin, nnx.state(loaded, nnx.Param)) if loaded else None
    outcome = train(run, console, resume, initial)
    console.print(f"saved step {outcome.step} in {run.out}")
    return 0 if outcome.signal is None else SIGNALLED + outcome.signal


def print_largest(
    run: RunConfig, target: str | None, capacity: str | None, console: Console
) -> int:
    """Print the largest batches as they are found, and the flags of the one with most units.

    A unit is a token, a picture or a time step of a series. `target` names a device, and `capacity`
    is its memory, such as "14GiB"; None for the device and the memory of this process.
    """
    results = []
    for result in largest(run, policy_of(run.policy), target, capacity):
        console.print(str(result))
        results.append(result)
    most = max(results, key=lambda result: result.units)
    if not most.batch:
        smallest = "one window" if most.length_name else "one example"
        raise InputError(f"no room for {smallest}: give --policy auto, or a smaller model")
    console.print(f"most {most.unit}: {most.flags}")
    return 0


def step_memory(run: RunConfig, target: str | None, capacity: str | None) -> Any:
    """Return the memory report of one step, which is compiled from shapes only.

    `target` and `capacity` mean the same as in `print_largest`.
    """
    policy, mesh = policy_of(run.policy), mesh_or_none(run.mesh, run.optim.offload_optimizer)
    step, *types = whole_step(run, mesh)
    with one_line():
        if isinstance(policy, xform.policies.Fit):
            policy = policy.within(memory_bytes(target, capacity), target or "this device")
        if bounds_peak(policy):
            policy = plan_of(lowered_step(run, policy, mesh, target))
        return xform.memory_analysis(
            step, *types, policy, target=target, capacity=capacity, donate_argnums=0
        )
