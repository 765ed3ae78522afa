"""Every place that takes a policy understands every text of a policy, and echoes it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from xform import commands, policies
from xform.errors import WrongArgument
from xform.planner import planning
from xform.planner.plan_program import plan_program
from xform.policies import policy_name
from xform.policies.vocabulary import TEXTS, as_code

X = np.array([0.3, -0.7, 1.1], np.float32)
KEY = jax.random.key(0)
# The texts, each with its policy.
POLICIES: dict[str, Any] = {
    "min_cut": policies.min_cut,
    "save_everything": policies.save_everything,
    "save_dots": policies.save_dots,
    "save_dots_with_no_batch_dims": policies.save_dots_with_no_batch_dims,
    "save_nothing": policies.save_nothing,
    "auto": policies.fit(),
    "budget:6GiB": policies.budget(6 * 2**30),
    "saved:500 MB": policies.budget("500 MB", of="saved"),
    "open:min_cut": policies.open_regions(),
    "open:budget:6GiB": policies.open_regions(policies.budget("6 GiB")),
    "open:auto": policies.open_regions("auto"),
    "save_only_these_names:a+b": policies.save_only_these_names("a", "b"),
    "save_any_names_but_these:a": policies.save_any_names_but_these("a"),
}
# Those that one remat region can have.
OF_REGIONS = {
    text
    for text, policy in POLICIES.items()
    if getattr(policy, "regions", "marked") == "marked" and text not in ("auto", "budget:6GiB")
}


def loss(x):
    return jnp.sum(jnp.sin(x) ** 2)


def named(x):
    return jnp.sum(xform.adjoints.name(jnp.sin(x), "h") ** 2)


def traced(f: Callable[..., Any], *args: Any) -> None:
    jax.eval_shape(f, *args)


def flax_grad(transform: Any) -> Callable[[Any], None]:
    def run(policy: Any) -> None:
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        nnx.jit(lambda m: transform(lambda m: jnp.sum(m(X)), policy=policy)(m)).trace(model)

    return run


# Every public function that takes a policy for a whole function.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda p: traced(xform.grad(loss, policy=p), X),
    "value_and_grad": lambda p: traced(xform.value_and_grad(loss, policy=p), X),
    "vjp": lambda p: traced(lambda x: xform.vjp(loss, x, policy=p), X),
    "fwd_and_bwd": lambda p: traced(xform.fwd_and_bwd(loss, 0, policy=p)[0], X),
    "jacobian": lambda p: traced(xform.jacobian(loss, policy=p), X),
    "jacobian.explain": lambda p: xform.jacobian.explain(loss, X, policy=p),
    "hvp": lambda p: traced(lambda x: xform.hvp(loss, (x,), (x,), policy=p), X),
    "partials": lambda p: traced(xform.adjoints.partials(named, "h", policy=p), X),
    "newton_step": lambda p: traced(lambda x: xform.curvature.newton_step(loss, (x,), policy=p), X),
    "natural_gradient_step": lambda p: traced(
        lambda x: xform.curvature.natural_gradient_step(
            jnp.sin, loss, (x,), distribution="normal", policy=p
        ),
        X,
    ),
    "hutchinson": lambda p: traced(
        lambda x: xform.curvature.hutchinson(loss, (x,), KEY, policy=p), X
    ),
    "hessian_spectrum": lambda p: traced(
        lambda x: xform.curvature.hessian_spectrum(loss, (x,), KEY, steps=2, policy=p), X
    ),
    "ggnvp": lambda p: traced(
        lambda x: xform.curvature.ggnvp(jnp.sin, loss, (x,), (x,), policy=p), X
    ),
    "fisher_vp": lambda p: traced(
        lambda x: xform.curvature.fisher_vp(jnp.sin, "normal", (x,), (x,), policy=p), X
    ),
    "plan": lambda p: xform.plan(loss, X, policy=p, verify=False),
    "residuals": lambda p: xform.residuals(loss, X, policy=p),
    "compare": lambda p: xform.compare(loss, X, policies=[p]),
    "compare, by name": lambda p: xform.compare(loss, X, policies={"mine": p}),
    "flax.grad": flax_grad(xform.flax.grad),
    "flax.value_and_grad": flax_grad(xform.flax.value_and_grad),
    "flax.vjp": lambda p: traced(lambda x: xform.flax.vjp(loss, x, policy=p)[0], X),
    "equinox.filter_grad": lambda p: traced(xform.equinox.filter_grad(loss, policy=p), X),
    "equinox.filter_value_and_grad": lambda p: traced(
        xform.equinox.filter_value_and_grad(loss, policy=p), X
    ),
    "equinox.filter_vjp": lambda p: traced(
        lambda x: xform.equinox.filter_vjp(loss, x, policy=p)[0], X
    ),
}
# Every public function that takes the policy of a region.
REGIONS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda p: traced(xform.grad(xform.checkpoint(loss, policy=p)), X),
    "flax.remat": lambda p: traced(xform.grad(xform.flax.remat(loss, policy=p)), X),
    "equinox.filter_checkpoint": lambda p: traced(
        xform.grad(xform.equinox.filter_checkpoint(loss, policy=p)), X
    ),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "install": lambda p: xform.install(policy=p),
    "open_regions": policies.open_regions,
    "save_from_both_policies": lambda p: policies.save_from_both_policies(p, policies.save_dots),
    "parse": policies.parse,
}


def planned_under(call: Callable[[Any], Any], policy: Any) -> list[Any]:
    """The policies that the planner is asked for in a call."""
    seen: list[Any] = []

    def watched(problem: Any, policy: Any, compiler: Any) -> Any:
        seen.append(policy)
        return plan_program(problem, policy, compiler)

    with planning.use_planner(watched):
        call(policy)
    return seen


def what(policy: Any) -> Any:
    return policy.rows if isinstance(policy, xform.Plan) else policy


@pytest.mark.filterwarnings("ignore:.*which no value has")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_text_means_its_policy(name: str, quick_compilation: None) -> None:
    for text, policy in POLICIES.items():
        seen = planned_under(FUNCTIONS[name], text)
        assert set(map(what, seen)) == set(map(what, planned_under(FUNCTIONS[name], policy))), text
        assert not any(isinstance(p, str) for p in seen)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "vjp", "partials", "flax.grad"])
def test_the_policy_of_a_text_reaches_the_planner(name: str) -> None:
    for text, policy in POLICIES.items():
        assert planned_under(FUNCTIONS[name], text) == [policy]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name", REGIONS)
def test_each_text_of_a_region(name: str, text: str) -> None:
    if text in OF_REGIONS:
        REGIONS[name](text)
        return
    with pytest.raises(WrongArgument, match=r"xform\.grad"):
        REGIONS[name](text)


@pytest.mark.parametrize("text", POLICIES)
def test_the_other_functions_that_take_a_text(text: str) -> None:
    policy = POLICIES[text]
    assert policies.parse(text) == policies.parse(policy) == policy
    with xform.install(policy=text):
        assert planned_under(lambda _: traced(lambda x: jax.grad(loss)(x), X), None) == [policy]
    whole = isinstance(policy, policies.MinCut | policies.Budget | policies.Fit)
    if whole:
        assert policies.open_regions(text) == policies.open_regions(policy)
    if not isinstance(policy, policies.Budget | policies.Fit):
        both = policies.save_from_both_policies(text, "save_dots")
        assert both == policies.save_from_both_policies(policy, policies.save_dots)


@pytest.mark.filterwarnings("ignore:.*which no value has")
def test_reports_echo_policy_texts_as_typed() -> None:
    for text in POLICIES:
        assert policy_name(policies.parse(text)) == text
    typed = [text for text in POLICIES if "auto" not in text]
    table = xform.compare(loss, X, policies=["auto", *typed])
    assert [entry.policy for entry in table] == ["auto", *typed]
    assert [entry.report.description.policy for entry in table][1:] == typed
    for text in typed:
        made = xform.plan(loss, X, policy=text, verify=False)
        assert made.policy == text
        assert str(made).startswith(f"plan of loss, {text}, on cpu\n")
        assert xform.residuals(loss, X, policy=text).title.endswith(f", {text}")


def test_pareto_and_compare_name_policies_alike() -> None:
    names = [point.name for point in xform.pareto(loss, X, points=2, verify=False)]
    stock = ["save_everything", "save_dots", "save_dots_with_no_batch_dims", "save_nothing"]
    assert names[-4:] == stock
    entries = xform.compare(loss, X, policies=names[-4:])
    assert [entry.policy for entry in entries] == stock
    assert names[0] == "min_cut"
    assert all(name.startswith("budget:") for name in names[1:-4])


@pytest.mark.parametrize(("policy", "python", "text"), [
    (policies.budget("6GiB"), "budget('6GiB')", "budget:6GiB"),
    (policies.budget(" 6 gib "), "budget(' 6 gib ')", "budget: 6 gib "),
    (policies.budget(6 * 2**30), "budget('6.0 GiB')", "budget:6.0GiB"),
    (policies.budget("1kB", of="saved"), "budget('1kB', of='saved')", "saved:1kB"),
    (policies.budget("10 B", batch_size=3), "budget('10 B', batch_size=3)",
     "budget('10 B', batch_size=3)"),
    (policies.budget("6GiB", solver="exact", verify=False),
     "budget('6GiB', solver='exact', verify=False)",
     "budget('6GiB', solver='exact', verify=False)"),
    (policies.fit("2 GiB", batch_size=4), "fit(reserve='2 GiB', batch_size=4)",
     "fit(reserve='2 GiB', batch_size=4)"),
    (policies.fit("2 GiB").within(8 * 2**30, "a chip"), "auto, 6.0 GiB of a chip",
     "auto, 6.0 GiB of a chip"),
    (policies.save_only_these_names("a+b"), "save_only_these_names(a+b)",
     "save_only_these_names(a+b)"),
])  # fmt: skip
def test_names(policy: Any, python: str, text: str) -> None:
    assert (repr(policy), policy_name(policy)) == (python, text)
    if isinstance(policy, policies.Budget) and not policy.device:
        assert eval(as_code(policy), {"xform": xform}) == policy


def test_a_changed_budget_does_not_keep_the_old_text() -> None:
    budget = policies.budget("6GiB")
    assert repr(type(budget)(budget.bytes // 2, typed=budget.typed)) == "budget('3.0 GiB')"
    assert budget == policies.budget("6 GiB") == policies.budget(6 * 2**30)
    assert hash(budget) == hash(policies.budget("6 GiB"))


def test_a_plan_in_a_file(tmp_path: Path) -> None:
    f = lambda w: jnp.sum(jnp.sin(jnp.sin(w) @ w))
    w = np.ones((4, 4), np.float32)
    made = xform.plan(f, w, policy="saved:10B", verify=False)
    made.save(path := tmp_path / "plan.json")
    assert policies.parse(made) is made
    assert policies.parse(f"plan:{path}").to_dict() == made.to_dict()
    assert xform.plan(f, w, policy=f"plan:{path}", verify=False).rows == made.rows
    jax.jit(xform.grad(f, policy=f"plan:{path}"))(w)
    for text in ("plan:", f"plan:{tmp_path}/none"):
        with pytest.raises(WrongArgument, match="cannot be read"):
            xform.grad(f, policy=text)
    (tmp_path / "no").write_text("{}")
    with pytest.raises(WrongArgument, match="holds no plan"):
        xform.grad(f, policy=f"plan:{tmp_path}/no")


# Texts and values that are no policy, each with the start of the remedy.
WRONG = {
    "savedots": "did you mean 'save_dots'? Or use one of min_cut, ",
    "dots": "did you mean 'save_dots'? Or ",
    "everything_saveable": "did you mean 'save_everything'? Or ",
    "6 GiB": "did you mean 'budget:6 GiB'? Or ",
    "1e9": "did you mean 'budget:1e9'? Or ",
    "budgets:6GiB": "did you mean 'budget:6GiB'? Or ",
    "budgt:3MiB": "did you mean 'budget:3MiB'? Or ",
    "budget": "did you mean 'budget:6GiB'? Or ",
    "open_regions": "did you mean 'open:min_cut'? Or ",
    "save_only_these_names": "did you mean 'save_only_these_names:a+b'? Or ",
    "Ω": "use one of min_cut, ",
    "": "use one of min_cut, ",
    600000: "did you mean 'budget:600000'? Or use a policy of xform.policies, ",
    True: "use a policy of xform.policies, or one of these texts: ",
}


@pytest.mark.parametrize("name", FUNCTIONS | REGIONS | OTHERS)
def test_unknown_policies_raise_with_the_closest_valid_text(name: str) -> None:
    call = (FUNCTIONS | REGIONS | OTHERS)[name]
    for given, remedy in WRONG.items():
        with pytest.raises(WrongArgument) as caught:
            call(given)
        request, problem, *_, last = str(caught.value).splitlines()
        assert request == f"policy={given!r}"
        assert problem == (
            f"  problem: no policy has the name {given!r}"
            if isinstance(given, str)
            else f"  problem: a value of type {type(given).__name__} is not a policy"
        )
        assert last.startswith(f"  remedy:  {remedy}")
        assert last.endswith(TEXTS)
    assert not xform.is_installed()


@pytest.mark.parametrize(("text", "problem"), [
    ("budget:", "it is not a number of bytes"),
    ("saved:six", "it is not a number of bytes"),
    ("open:", "no policy has the name ''"),
    ("open:open:", "no policy has the name ''"),
    ("open:save_dots", "decides about one value at a time"),
    ("save_only_these_names:", "a name of a value is empty"),
    ("save_any_names_but_these:a++b", "a name of a value is empty"),
    ("save_from_both_policies", "needs arguments, which cannot be written in this text"),
    ("offload_dots_with_no_batch_dims", "needs arguments, which cannot be written in this text"),
])  # fmt: skip
def test_texts_with_a_wrong_part(text: str, problem: str) -> None:
    with pytest.raises(WrongArgument, match=problem) as caught:
        policies.parse(text, f"--policy {text}")
    assert caught.value.request == f"--policy {text}"


COMMANDS = {
    "compare": [],
    "fits": ["--target", "cpu"],
    "max-batch": ["--target", "cpu"],
    "memory": [],
    "plan": [],
    "residuals": [],
    "run": [],
    "show": ["--transform", "grad"],
    "why-oom": ["--target", "cpu"],
}


def inputs() -> tuple[Any]:
    """The arguments of `loss` on the command line."""
    return (X,)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_every_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = [__file__] if name == "run" else [f"{__name__}:loss", *COMMANDS[name]]
    read: list[Any] = []

    class Read(WrongArgument):
        pass

    def parse(policy: Any, request: str = "") -> Any:
        read.append((policy, request, policies.policy_name(original(policy, request))))
        raise Read(request, "", "", "")

    original = policies.parse
    monkeypatch.setattr(policies, "parse", parse)
    for text in POLICIES:
        with pytest.raises(Read):
            commands.run([name, "--policy", text, *subject])
    assert read == [(text, f"--policy {text}", text) for text in POLICIES]
    assert set(COMMANDS) == {c for c in commands.COMMANDS if _has_policy(c)}


def _has_policy(name: str) -> bool:
    parser = argparse.ArgumentParser()
    commands.COMMANDS[name].arguments(parser)
    return any("--policy" in action.option_strings for action in parser._actions)


def test_equinox_modules_take_texts_too() -> None:
    model = eqx.nn.Linear(3, 1, key=KEY)
    f = xform.equinox.filter_grad(lambda m: jnp.sum(m(jnp.asarray(X))), policy="budget:1MiB")
    eqx.filter_jit(f)(model)
