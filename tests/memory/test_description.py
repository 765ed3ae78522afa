"""The header of a report: transform, policy and arguments."""

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.memory.description import describe

W, X = jnp.ones((4, 3)), jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)


def loss(w, x):
    return jnp.sum(x @ w["a"])


def described(f, *args, **kwargs) -> list[str]:
    return str(describe(f, args, kwargs)).splitlines()


def test_transforms_and_policies() -> None:
    assert described(loss, {"a": W}, X) == [
        "compiled: the function as it is", "arguments: w (1 array, 48 B), x bf16[2,4]"]  # fmt: skip
    assert described(jax.jit(xform.grad(loss)), {"a": W}, X)[0] == (
        "compiled: its grad by argument 0, policy min_cut")  # fmt: skip
    both = xform.value_and_grad(loss, (0, 1), policy=xform.policies.budget("1 MiB"))
    assert described(both, {"a": W}, X)[0] == (
        "compiled: its value_and_grad by arguments 0, 1, policy budget:1 MiB")  # fmt: skip


def test_arguments_of_all_kinds() -> None:
    f = lambda *xs, **named: 0
    assert described(f, 3, "train", object(), k=W)[1] == (
        "arguments: xs[0] 3, xs[1] 'train', xs[2] object, k f32[4,3]")  # fmt: skip
    assert described(f)[1] == "arguments: none"
    assert described(f, *[W] * 10)[1].endswith("xs[7] f32[4,3], and 2 more, (2 arrays, 96 B)")


@pytest.mark.parametrize("target", [None, "cpu:2"])
def test_reports_say_it(target) -> None:
    args = {"a": W}, jnp.ones((2, 4))
    report = xform.memory_analysis(xform.grad(loss), *args, target=target)
    lines = str(report).splitlines()
    assert lines[1] == "compiled: its grad by argument 0, policy min_cut"
    assert lines[2] == "arguments: w (1 array, 48 B), x f32[2,4]"
    assert report.to_dict()["policy"] == "min_cut"
    assert report.to_dict()["compiled"] == "its grad by argument 0, policy min_cut"


def test_comparison_prints_the_shared_description_once() -> None:
    args = {"a": W}, jnp.ones((2, 4))
    policies = [None, xform.policies.save_nothing]
    table = xform.compare(loss, *args, policies=policies)
    assert str(table).splitlines()[:4] == [
        "loss", "compiled: its value_and_grad by argument 0",
        "arguments: w (1 array, 48 B), x f32[2,4]", ""]  # fmt: skip
    assert [e.report.description.policy for e in table] == ["min_cut", "save_nothing"]
    one, other = (e.report for e in table)
    assert "loss on cpu, min_cut" in str(one.diff(other)).splitlines()[0]

    step = xform.jit(lambda w, x: xform.grad(loss)(w, x))
    (entry,) = xform.compare(step, *args, policies=[None])
    assert entry.report.description.compiled == "the function as it is, policy min_cut"


@pytest.mark.parametrize("target", [None, "cpu:2"])
def test_nonarray_arguments_are_static_and_described(target) -> None:
    class Config:
        scale = 3.0

    def f(mode, w, options, config, *, name):
        assert (mode, options["kind"], name) == ("train", "k", "n")
        return w * options["by"] * config.scale

    report = xform.memory_analysis(f, "train", W, {"kind": "k", "by": 2.0}, Config(), name="n",
                                   target=target)  # fmt: skip
    assert report.output_bytes == 48
    assert report.description.arguments == (
        "mode 'train', w f32[4,3], options (0 arrays, 0 B), config Config, name 'n'")  # fmt: skip
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"), None, None
    halved = xform.memory_analysis(f, "train", W, {"kind": "k", "by": 2.0}, Config(), name="n",
                                   target="cpu:2", mesh={"data": 2}, in_specs=specs)  # fmt: skip
    assert halved.argument_bytes < report.argument_bytes
    made = xform.plan(lambda mode, w, config: jnp.sum(jnp.sin(w) * config.scale), "train", W,
                      Config(), argnums=1, verify=False)  # fmt: skip
    assert made.forward_flops
