"""The architecture as tests: who may import what, what is public, and that a data point walks in a straight line."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import pytest

import inchworm
from inchworm import PPOConfig, PPOTrainer

SOURCE = Path(inchworm.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def all_imports(path: Path) -> tuple[str, ...]:
    return tuple(imports(TREES[path], late=True))


MODULES = {module_name(path): path for path in FILES}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST, *, late: bool) -> Iterator[str]:
    """Every module that is imported; without `late`, those that importing the file imports."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if late or not (deferred or typing_only):
            yield from imports(child, late=late)


@pytest.mark.parametrize(
    ("framework", "home"),
    [("torch", "backends/torch/"), ("jax", "backends/jax/"), ("flax", "backends/jax/"), ("stable_baselines3", "nowhere")],
)
def test_a_learning_framework_is_imported_in_its_folder_only(framework: str, home: str) -> None:
    strangers = [
        relative(path)
        for path in FILES
        if not relative(path).startswith(home) and any(name.split(".")[0] == framework for name in all_imports(path))
    ]
    assert strangers == []


def imported_by(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `code`."""
    program = f"{code}\nimport sys\nprint('|'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.strip().splitlines()[-1].split("|")}


def test_import_inchworm_imports_nothing_heavy() -> None:
    assert imported_by("import inchworm; dir(inchworm)").isdisjoint({"torch", "jax", "gymnasium", "numpy", "pydantic", "rich"})


COLLECT = """
from inchworm import NumpyPolicy, PolicyConfig, PolicySpec, RolloutCollector, evaluate_policy, make_vector_env
env = make_vector_env("CartPole-v1", 2)
policy = NumpyPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig()))
rollout = RolloutCollector(env, policy).collect(8)
assert rollout.num_valid == 16
"""
LIBRARY = """
from inchworm import Rollout, load_policy, PolicyEvaluator, PPOTrainer, compute_advantages, functional_training_loop
import inchworm.env.workers.program, inchworm.collect.async_collector, inchworm.collect.ray_collector
import inchworm.cli.main, inchworm.cli.train, inchworm.cli.evaluate, inchworm.cli.rollouts
"""


@pytest.mark.parametrize("code", [COLLECT, LIBRARY])
def test_acting_and_collecting_import_no_learning_framework(code: str) -> None:
    assert imported_by(code).isdisjoint({"torch", "jax"})


def test_the_stub_is_the_table_of_public_names() -> None:
    stub = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [(node.module, alias.name) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted([*(name for _, name in imported), "__version__"]) == sorted(inchworm.__all__)
    assert set(inchworm.__all__) <= set(dir(inchworm))
    for module, name in imported:
        assert getattr(inchworm, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        inchworm.Trainer  # noqa: B018


def test_no_import_cycles() -> None:
    graph = {
        name: {found for imported in imports(TREES[path], late=False) if (found := nearest(imported))} for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph[name] - {name}:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def nearest(imported: str) -> str | None:
    """The module of this package that an imported name is, or lives in."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in MODULES and name != "inchworm"), None)


FLOORS = (
    {"core"},
    {"config"},
    {"env", "rollout", "policy"},
    {"worlds", "backends"},
    {"backends.numpy"},
    {"backends.torch", "backends.jax"},
    {"collect"},
    {"tracking"},
    {"run"},
    {"evaluate"},
    {"selfplay"},
    {"train"},
    {"policy_check", "analysis"},
    {"cli"},
)
"""Packages from the ground up; each may import those below it, and `NEVER` lists what even then it may not."""

NEVER = {
    ("policy", "rollout"),
    ("rollout", "policy"),
    ("rollout", "env"),
    ("collect", "worlds"),
    ("backends", "env"),
    ("backends", "collect"),
}


def package_of(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "backends" and len(parts) > 2 else parts[0]


def test_packages_import_downwards_only() -> None:
    """Imports at module level point to a lower floor; late imports (inside functions) are how a registry reaches upwards."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    upwards = set()
    for name, path in MODULES.items():
        for target in filter(None, map(nearest, imports(TREES[path], late=False))):
            if "." not in target or "." not in name or name == "inchworm.__main__":
                continue
            ours, theirs = package_of(name), package_of(target)
            if ours != theirs and (floor[theirs] >= floor[ours] or (ours, theirs) in NEVER):
                upwards.add((name, target))
    assert upwards == set()


FORBIDDEN_CALLS = {"hasattr", "print", "eval", "exec", "locals"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("np", "load"), ("np", "seed")}
FORBIDDEN_MODULES = {"pickle", "dill", "marshal", "shelve", "joblib"}


def breaches(path: Path, tree: ast.AST) -> Iterator[str]:
    for name in all_imports(path):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield f"imports {name}"
        if name.split(".")[0] == "cloudpickle" and not relative(path).startswith(("env/", "collect/host", "train/seed_trainers")):
            yield f"imports {name}, which is for env/ and the processes of collectors and seeds alone"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"line {node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES:
            yield f"line {node.lineno} uses {node.value.id}.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield f"line {node.value.lineno} passes {node.arg}"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno} has a bare except"


def test_house_rules() -> None:
    found = [f"{relative(path)}: {breach}" for path, tree in TREES.items() for breach in breaches(path, tree)]
    assert found == []


def test_cloudpickle_reads_only_what_a_socket_brought() -> None:
    """`cloudpickle.loads` stands once in each program that a parent starts; nothing reads it from a file."""
    uses = {relative(path): text.count("cloudpickle.load") for path in FILES if "cloudpickle.load" in (text := path.read_text())}
    assert uses == {"env/workers/program.py": 1, "collect/host.py": 1, "train/seed_trainers.py": 1}


# The walk of one data point (docs/index.md): which files are each step's room.
ROOMS = {
    1: r"env/(workers/program|local|gymnasium_copy|pettingzoo_copy|values|make)",
    2: r"env/(vector_env|source|episodes|workers/pool)",
    3: r"collect/\w+",
    4: r"backends/\w+/(policy|network|encoding|distributions)|policy/\w+",
    5: r"rollout/buffer",
    6: r"backends/\w+/gae",
    7: r"rollout/sequences",
    8: r"backends/\w+/loss",
    9: r"backends/(\w+/(learner|adam)|learner)",
}
# The functions that hand the data point on: when they first return, it has passed their step.
HANDS_ON = {
    1: ("env/local", "LocalCopies.reset"),
    2: ("env/vector_env", "LaneVectorEnv.reset"),
    4: ("backends/numpy/policy", "NumpyPolicy.act"),
    5: ("rollout/buffer", "RolloutBuffer.get"),
    6: ("backends/torch/gae", "compute_advantages"),
    7: ("rollout/sequences", "split_into_sequences"),
    8: ("backends/torch/loss", "ppo_loss"),
    9: ("backends/learner", "BaseLearner.update"),
}


class Walk:
    """Watches one iteration: in which order the steps are passed, and which doors between their rooms are used."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.doors: set[tuple[int, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = self.file(frame)
        if file is None or event not in ("call", "return"):
            return
        if event == "return":
            self.order += [step for step, place in HANDS_ON.items() if place == (file, frame.f_code.co_qualname) and step not in self.order]
            return
        here, origin = self.room(frame), self.caller(frame)
        if here is not None and origin is not None and here != origin:
            self.doors.add((origin, here))
            if (origin, here) == (3, 4) and frame.f_code.co_name == "act" and 3 not in self.order:
                self.order.append(3)  # the collector hands the observation to the policy

    @staticmethod
    def file(frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        return path.removeprefix(f"{SOURCE}/").removesuffix(".py") if path.startswith(f"{SOURCE}/") else None

    def room(self, frame: FrameType) -> int | None:
        file = self.file(frame) or ""
        return next((step for step, pattern in ROOMS.items() if re.fullmatch(pattern, file)), None)

    def caller(self, frame: FrameType) -> int | None:
        """The nearest room outwards; what lies between (trees, checks, NumPy, torch) only passes through."""
        outer = frame.f_back
        while outer is not None and self.room(outer) is None:
            outer = outer.f_back
        return self.room(outer) if outer is not None else None


@pytest.fixture(scope="module")
def walk() -> Walk:
    config = PPOConfig(rollout_steps=8, num_minibatches=2, update_epochs=1)
    seen = Walk()
    with PPOTrainer("mlp", lambda: gym.make("CartPole-v1"), config, num_envs=2, backend="torch") as trainer:
        trainer.learner  # noqa: B018 - made before the walk begins
        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            trainer.learn(trainer.collect_rollouts())
        finally:
            sys.setprofile(before)
    return seen


def test_one_iteration_passes_the_steps_in_order(walk: Walk) -> None:
    assert walk.order == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_no_door_of_the_walk_is_used_both_ways(walk: Walk) -> None:
    assert {(3, 2), (2, 1), (3, 4), (3, 5), (9, 6), (9, 7), (9, 8), (6, 4)} <= walk.doors, "the walk was watched"
    assert {door for door in walk.doors if door[::-1] in walk.doors} == set()


def test_collect_and_learn_touch_at_the_rollout_alone(walk: Walk) -> None:
    """The rooms of collect (1 to 5) and those of learn (6 to 9) have no door between them, except to the policy, which both use."""
    across = {door for door in walk.doors if (door[0] <= 5) != (door[1] <= 5)}
    assert {target for _, target in across} <= {4}
