"""Exports act as the policy does: every architecture in NumPy, a choice that covers all of them as graphs."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from inchworm import InchwormError, NumpyPolicy, PolicyConfig, PolicySpec, TorchPolicy, export_policy
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.backends.torch.context import TaskPolicy
from inchworm.backends.torch.network import Network
from inchworm.core.errors import ConfigError, MissingExtraError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import mask_space, tree_leaves, with_mask
from inchworm.core.types import PolicyStep
from inchworm.policy.composite import CompositePolicy
from inchworm.run import export

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))
ACTIONS = {
    "discrete": (spaces.Discrete(4, start=3), "clip"),
    "multi_discrete": (spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[1, 0], [0, 5]]), "clip"),
    "multi_binary": (spaces.MultiBinary(3), "clip"),
    "clip": (BOX, "clip"),
    "tanh": (spaces.Box(-0.1, 0.1, (2, 1), np.float64), "tanh"),
    "hybrid": (spaces.Dict({"z": spaces.Discrete(3, start=-1), "arm": spaces.Tuple([BOX, spaces.MultiBinary(2)])}), "tanh"),
}
NUMBERS = spaces.Box(-np.inf, np.inf, (3,))
SCENE = spaces.Dict(
    {
        "place": spaces.Tuple([spaces.Box(-5, 5, (2, 2), np.float64), spaces.Discrete(3, start=-1)]),
        "kinds": spaces.MultiDiscrete([2, 3]),
        "'] or 1/0 #": spaces.MultiBinary(2),  # whatever a key holds, it is a key
    }
)
IMAGES = spaces.Dict({"camera": spaces.Box(0, 255, (20, 20, 3), np.uint8), "depth": spaces.Box(0, 1, (1, 20, 20)), "at": NUMBERS})
FILTERS = ((4, 4, 2), (6, 3, 1))


def spec_of(kind: str, action: str, *, masked: bool = False, seen: spaces.Space | None = None, **options: object) -> PolicySpec:
    space, bounds = ACTIONS[action]
    seen = seen or (IMAGES if kind == "cnn" else SCENE if masked else NUMBERS)
    seen = with_mask(seen, mask_space(space)) if masked else seen
    sizes = {"hidden_sizes": (8, 6), "memory_size": 5, "cnn_filters": FILTERS, "cnn_features": 7}
    shared = (spaces.Box(-1, 1, (5,)), 2) if "central_critic" in options else ()
    config = PolicyConfig(kind=kind, action_bounds=bounds, **{**sizes, "normalize_observations": True, **options})
    return PolicySpec(seen, space, config, *shared)


def weights_of(spec: PolicySpec) -> dict[str, np.ndarray]:
    """Weights with which every part of the policy matters: no bias is zero, no statistic is neutral."""
    rng, fresh = np.random.default_rng(1), TorchPolicy(spec, seed=1).get_weights()
    moved = {
        name: (value + 0.2 * rng.standard_normal(value.shape)).astype(value.dtype) for name, value in fresh.items() if name in spec.layers
    }
    for name, value in fresh.items():
        if name.endswith("_normalizer.count"):
            moved[name] = np.array(10, value.dtype)
        elif name.endswith("_normalizer.mean"):
            moved[name] = value + 0.3
        elif name.endswith("_normalizer.var"):
            moved[name] = value * 2.0
    return fresh | moved


def policy_of(spec: PolicySpec) -> NumpyPolicy | TorchPolicy:
    kind = TorchPolicy if spec.observations.images else NumpyPolicy
    return kind(spec, weights_of(spec))


def compare(policy: NumpyPolicy | TorchPolicy, act: object, *, steps: int = 3) -> None:
    """Greedy and sampled actions are the policy's over steps with memory and resets, in batches of 3 and 1."""
    for batch in (3, 1):
        ours, theirs = policy.initial_state(batch), None
        streams = np.random.default_rng(5), np.random.default_rng(5)
        for step in range(steps):
            observation, _ = export._probe(policy.spec, policy, batch, seed=step)
            starts = np.zeros(batch, bool)
            for sampled in (False, True):
                expected: PolicyStep = policy.act(observation, ours, starts, streams[0], deterministic=not sampled)
                action, after = act(observation, theirs, streams[1] if sampled else None)
                for one, other in zip(tree_leaves(expected.env_actions), tree_leaves(action), strict=True):
                    assert (one.shape, one.dtype) == (other.shape, other.dtype)
                    np.testing.assert_allclose(one, other, atol=1e-5)
            assert all(np.abs(after[name] - part).max() < 1e-5 for name, part in (expected.state or {}).items())
            ours, theirs = expected.state, after if after else None


NUMPY_CASES = [
    *[("mlp", action, masked, {}) for action in ACTIONS for masked in (False, action in ("discrete", "multi_discrete", "hybrid"))],
    *[(kind, action, False, {"memory_layers": 2}) for kind in ("lstm", "gru") for action in ("discrete", "clip")],
    *[(kind, "hybrid", True, {"memory_place": "before"}) for kind in ("lstm", "gru")],
    *[("mlp", "tanh", False, {"activation": activation}) for activation in ("relu", "elu", "leaky_relu", "silu")],
    ("mlp", "discrete", False, {"hidden_sizes": (4, 4, 4, 4), "shared_trunk": True}),
    ("mlp", "clip", False, {"hidden_sizes": ()}),
    ("mlp", "discrete", False, {"central_critic": True, "normalize_values": True}),
    ("cnn", "multi_binary", False, {}),
    ("cnn", "hybrid", True, {"activation": "relu"}),
    ("lstm", "hybrid", True, {"seen": IMAGES}),
]


@pytest.mark.parametrize(("kind", "action", "masked", "options"), NUMPY_CASES)
def test_a_numpy_export_acts_as_the_policy(kind: str, action: str, masked: bool, options: dict, tmp_path: Path) -> None:
    policy = policy_of(spec_of(kind, action, masked=masked, **options))
    written = export_policy(policy, tmp_path, "numpy")
    assert written.max_error <= 1e-5
    assert {file.name for file in written.files} == {"actor.py", "weights.npz", "interface.json"}
    assert len((tmp_path / "actor.py").read_text().splitlines()) < 110
    compare(policy, runpy.run_path(str(tmp_path / "actor.py"))["act"])


def test_agents_that_lack_dimensions_get_zeros_there(tmp_path: Path) -> None:
    seen = spaces.Dict({"x": NUMBERS, DIMENSIONS_KEY: spaces.MultiBinary(2)})
    policy = policy_of(PolicySpec(seen, BOX, PolicyConfig(hidden_sizes=(6,))))
    assert policy.spec.has_dimensions
    assert export_policy(policy, tmp_path / "numpy", "numpy").max_error <= 1e-5
    compare(policy, runpy.run_path(str(tmp_path / "numpy" / "actor.py"))["act"])


GRAPH_CASES = [  # together: every kind, every part of an action, masks, memory, images, dict observations, both bounds
    ("lstm", "hybrid", True, {"seen": IMAGES, "memory_layers": 2}),
    ("gru", "clip", False, {"memory_place": "before", "activation": "silu"}),
]


@pytest.mark.parametrize(("kind", "action", "masked", "options"), GRAPH_CASES)
def test_graphs_agree_with_the_policy_and_need_no_inchworm(kind: str, action: str, masked: bool, options: dict, tmp_path: Path) -> None:
    policy = policy_of(spec_of(kind, action, masked=masked, **options))
    for format, name in (("onnx", "policy.onnx"), ("torch", "policy.pt2")):
        written = export_policy(policy, tmp_path / format, format)
        assert written.max_error <= 1e-5
        interface = json.loads((tmp_path / format / "interface.json").read_text())
        assert interface["inputs"][0]["shape"][0] == "batch"
        assert written.files[0] == tmp_path / format / name
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "policy.onnx")
    assert [one.name for one in session.get_inputs()] == [one["name"] for one in interface["inputs"]]
    assert [one.name for one in session.get_outputs()] == interface["outputs"]
    assert ("state.hidden" in [one["name"] for one in interface["inputs"]]) == (kind != "mlp")


def test_an_export_runs_where_only_numpy_is(tmp_path: Path) -> None:
    policy = policy_of(spec_of("lstm", "hybrid", masked=True))
    export_policy(policy, tmp_path / "out", "numpy")
    observation, _ = export._probe(policy.spec, policy, 2, seed=0)
    np.savez(tmp_path / "observation.npz", *tree_leaves(observation))
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["inchworm", "torch", "jax", "gymnasium"]))  # None: their import fails
sys.path.insert(0, {str(tmp_path / "out")!r})
import numpy as np
from actor import act, initial_state
read = [array for array in np.load({str(tmp_path / "observation.npz")!r}).values()]
zero, mask_arm, mask_z, kinds, box, kind = read
observation = {{"'] or 1/0 #": zero, "action_mask": {{"arm": ((), mask_arm), "z": mask_z}}, "kinds": kinds, "place": (box, kind)}}
action, state = act(observation)
action, state = act(observation, state)
print(action["z"].tolist(), state["hidden"].shape)
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    state = policy.initial_state(2)
    for _ in range(2):
        step = policy.act(observation, state, np.zeros(2, bool), np.random.default_rng(0), deterministic=True)
        state = step.state
    assert done.stdout.strip() == f"{step.env_actions['z'].tolist()} (2, 1, 5)", done.stderr


def test_a_policy_of_jax_is_exported_by_its_weights(tmp_path: Path) -> None:
    spec = spec_of("mlp", "discrete")
    assert export_policy(JaxPolicy(spec, weights_of(spec)), tmp_path, "numpy").max_error <= 1e-5


# ---- what is refused
def test_a_program_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = export.actor_source
    monkeypatch.setattr(export, "actor_source", lambda spec: right(spec).replace("np.tanh(x)", "np.tanh(0.99 * x)"))
    policy = policy_of(spec_of("mlp", "discrete"))
    with pytest.raises(
        InchwormError, match=r"actor.py was removed: it differs from the policy by 0\.\d+ in logits, more than tolerance=1e-05"
    ):
        export_policy(policy, tmp_path, "numpy")
    assert not (tmp_path / "actor.py").exists()
    assert export_policy(policy, tmp_path / "loose", "numpy", tolerance=1.0).max_error > 1e-3


@pytest.mark.parametrize(
    ("right", "wrong", "output"),
    [
        ("np.where(legal", "np.where(True", "logits"),
        ("sigmoid(f) * c", "c", "next_state.cell"),
        ('out["state"]', "initial_state(1)", "next_state"),
        ("return logits.argmax(1)", "return logits.argmin(1)", "action"),
        ("np.tanh(value)", "value", "action.arm.0"),
        ('x @ W[name + ".weight"].T', 'x @ W[name + ".weight"].T * 1.001', "next_state"),
    ],
)
def test_every_output_is_compared(right: str, wrong: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = export.actor_source
    monkeypatch.setattr(export, "actor_source", lambda spec: source(spec).replace(right, wrong))
    with pytest.raises(InchwormError, match=output):
        export_policy(policy_of(spec_of("lstm", "hybrid", masked=True, normalize_observations=False)), tmp_path, "numpy")


class Own(Network):
    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, spec.actions.num_outputs), nn.Linear(3, 1)

    def action_outputs(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.actor(observations.to(torch.float32)))

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        return self.critic(observations).squeeze(-1)


class Branches(Own):
    def action_outputs(self, observations: torch.Tensor) -> torch.Tensor:
        return super().action_outputs(observations if observations.sum() > 0 else -observations)


def test_a_network_of_ones_own_is_exported_as_a_graph(tmp_path: Path) -> None:
    spec = PolicySpec(NUMBERS, spaces.Discrete(2), PolicyConfig())
    policy = TorchPolicy(spec, network=Own(spec))
    assert export_policy(policy, tmp_path, "torch").max_error <= 1e-5
    module = torch.export.load(tmp_path / "policy.pt2").module()
    seen = torch.randn(7, 3)
    assert torch.equal(module(seen)[0], policy.network.action_outputs(seen).argmax(1))
    with pytest.raises(ConfigError, match=r"the network .*:Own is a program of yours, which NumPy cannot run"):
        export_policy(policy, tmp_path / "numpy", "numpy")
    with pytest.raises(ConfigError, match=r"torch.export cannot trace the network Branches"):
        export_policy(TorchPolicy(spec, network=Branches(spec)), tmp_path / "branches", "torch")


def test_bad_requests_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doubles.policies import Careful

    policy = policy_of(spec_of("mlp", "discrete"))
    with pytest.raises(ConfigError, match="no export format 'tflite'; use one of onnx, torch, numpy"):
        export_policy(policy, tmp_path, "tflite")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Careful cannot be exported"):
        export_policy(Careful(), tmp_path, "torch")
    told = TaskPolicy(spec_of("mlp", "discrete", normalize_observations=False), features=6)
    with pytest.raises(ConfigError, match=r"TaskPolicy cannot be exported: it acts by trajectories of its task \(set_context\)"):
        export_policy(told, tmp_path, "onnx")
    several = CompositePolicy({"red": policy, "blue": policy}, ["red", "blue"])
    with pytest.raises(ConfigError, match=r"several policies are exported one by one: export_policy\(composite.policies\['red'\]"):
        export_policy(several, tmp_path, "numpy")
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty and holds no earlier export"):
        export_policy(policy, tmp_path, "numpy")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r'needs onnxscript, which is not installed; type: pip install "inchworm\[export\]"'):
        export_policy(policy, tmp_path / "onnx", "onnx")


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    for action in ("discrete", "clip"):
        export_policy(policy_of(spec_of("mlp", action)), tmp_path, "numpy")
    assert json.loads((tmp_path / "interface.json").read_text())["outputs"] == ["action", "means", "log_std"]
