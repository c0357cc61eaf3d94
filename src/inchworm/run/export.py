"""Export of a policy: a program that acts without inchworm, compared with the policy when it is written."""

from __future__ import annotations

import io
import json
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from inchworm.backends.numpy.distributions import mask_logits
from inchworm.backends.numpy.policy import encode_legal
from inchworm.backends.registry import get_backend, is_builtin, make_policy
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.protocols import Actor, Policy
from inchworm.core.seeding import make_stream
from inchworm.core.spaces import MASK_KEY, build_tree, leaf, leaf_dtype, leaf_shape, leaves, map_tree, split_mask
from inchworm.core.tensor_file import make_directory, write_atomically
from inchworm.core.types import Tree
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import class_path
from inchworm.policy.numpy_actor import actor_source, actor_weights
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, PolicySpec
from inchworm.rollout.fake import create_fake_rollout

Format = Literal["onnx", "torch", "numpy"]
FILES: dict[str, tuple[str, ...]] = {"onnx": ("policy.onnx",), "torch": ("policy.pt2",), "numpy": ("actor.py", "weights.npz")}
"""The files of each format; each also has `interface.json`."""
INTERFACE = "interface.json"
TOLERANCE = 1e-5
"""The largest difference from the policy that is accepted, absolute below 1 and relative above."""
_TIE = 1e-3  # of logits: closer ones may be ordered by rounding
_PROBES, _STEPS = 16, 3

Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Export:
    """A written export."""

    directory: Path
    format: str
    files: tuple[Path, ...]
    max_error: float
    """The largest difference from the policy in the parity check: of logits, means, log-std, actions and memory."""


def export_policy(policy: Actor, directory: str | Path, format: Format = "onnx", *, tolerance: float = TOLERANCE) -> Export:
    """Write a policy as ONNX, as a torch.export program or as a NumPy program, and check that it agrees with the policy.

    The program reads observations and the memory and returns the most likely action, logits, means, log-std and the next memory.
    It is refused if any of them differs from the policy's by more than `tolerance` on random inputs.
    """
    directory = Path(directory)
    if format not in FILES:
        raise ConfigError(f"there is no export format {format!r:.80}; use one of {', '.join(FILES)}")
    if isinstance(policy, CompositePolicy):
        raise ConfigError(
            f"several policies are exported one by one: export_policy(composite.policies[{next(iter(policy.policies))!r}], …)"
        )
    if getattr(policy, "reads_context", False):
        raise ConfigError(
            f"{class_path(policy)} cannot be exported: it acts by trajectories of its task (set_context), which no export reads"
        )
    network = getattr(policy, "own_network", None)
    if not isinstance(policy, Policy) or not (is_builtin(policy) or network is not None):
        raise ConfigError(
            f"{class_path(policy)} cannot be exported: only built-in policies, and networks of yours in a TorchPolicy, are known as a graph"
        )
    if network is not None and format == "numpy":
        raise ConfigError(f"the network {class_path(network)} is a program of yours, which NumPy cannot run; use --format torch, or onnx")
    if directory.exists() and any(directory.iterdir()) and not (directory / INTERFACE).is_file():
        raise ConfigError(f"{directory} is not empty and holds no earlier export; name another directory")
    given: Any = policy
    spec: PolicySpec = given.spec
    backend = "torch" if spec.observations.images else "numpy"  # the one that acts with it
    reference = given if network is not None else make_policy(spec, weights=policy.get_weights(), backend=backend)
    make_directory(directory)
    paths = tuple(directory / name for name in FILES[format])
    inputs, outputs = _names(spec, reference)
    example = _in_order(spec, *_probe(spec, reference, 2, seed=0))
    if format == "numpy":
        stored = io.BytesIO()
        np.savez(stored, **cast(Any, actor_weights(spec, policy.get_weights())))
        write_atomically(paths[1], stored.getvalue())
        write_atomically(paths[0], actor_source(spec))
        run = _numpy_runs(paths[0])
    else:
        torch_policy = given if network is not None else make_policy(spec, weights=policy.get_weights(), backend="torch")
        writer = get_backend("torch").exporting()
        if format == "torch":
            compute = writer.write_program(torch_policy, example, paths[0])
        else:
            compute = writer.write_onnx(torch_policy, example, paths[0], inputs, outputs)

        def run(observation: Tree, state: Tree) -> Outputs:
            return dict(zip(outputs, compute(_in_order(spec, observation, state)), strict=True))

    error = check_parity(spec, reference, run, paths[0], tolerance)
    write_atomically(directory / INTERFACE, json.dumps(_interface(spec, format, inputs, outputs, example, error), indent=1))
    return Export(directory, format, (*paths, directory / INTERFACE), error)


def _dotted(root: str, path: tuple[str | int, ...]) -> str:
    return ".".join([root, *map(str, path)])


def _names(spec: PolicySpec, policy: Any) -> tuple[list[str], list[str]]:
    """The names of the inputs and outputs of a graph, in order."""
    memory = list(policy.initial_state(1))
    inputs = [_dotted("observation", path) for path, _ in leaves(spec.observation_space)] + [f"state.{name}" for name in memory]
    outputs = [_dotted("action", part.path) for part in spec.actions.parts]
    outputs += ["logits"] if spec.actions.num_logits else []
    outputs += ["means", "log_std"] if spec.actions.num_gaussians else []
    return inputs, outputs + [f"next_state.{name}" for name in memory]


def _in_order(spec: PolicySpec, observation: Tree, state: Tree) -> list[np.ndarray]:
    """The arrays of an observation and a memory in the order of a graph's inputs."""
    return [leaf(observation, path) for path, _ in leaves(spec.observation_space)] + list(state.values() if state else ())


def _interface(
    spec: PolicySpec, format: str, inputs: list[str], outputs: list[str], example: list[np.ndarray], error: float
) -> dict[str, Any]:
    """What a program that loads the export has to know, as plain data."""
    described = [{"name": name, "shape": ["batch", *array.shape[1:]], "dtype": array.dtype.name} for name, array in zip(inputs, example)]
    return {"format": format, **spec.to_dict(), "inputs": described, "outputs": outputs, "max_error": error}


def _probe(spec: PolicySpec, policy: Any, batch: int, *, seed: int) -> tuple[Tree, Tree]:
    """Random observations [B, *obs] with random masks, which allow one choice or more, and a random memory."""
    fake = create_fake_rollout(spec.observation_space, spec.action_space, 1, batch, seed=seed, episode_length=2)
    rng = make_stream(seed, "export")
    observation = map_tree(lambda array: np.array(array[0]), fake.observations)
    _, mask = split_mask(spec.observation_space)
    if mask is not None:
        flat = rng.random((batch, spec.actions.num_logits)) < 0.5
        for group in spec.actions.groups:
            flat[np.arange(batch), group.start + rng.integers(0, group.stop - group.start, batch)] = True
        starts = np.cumsum([0, *(sum(part.sizes) for part in spec.actions.parts)])
        at = {part.path: flat[:, a:b] for part, a, b in zip(spec.actions.parts, starts, starts[1:])}
        observation[MASK_KEY] = build_tree(mask, lambda path, space: at[path].reshape(batch, *leaf_shape(space)).astype(leaf_dtype(space)))
    ordered = build_tree(spec.observation_space, lambda path, _: leaf(observation, path))
    state = policy.initial_state(batch)
    return ordered, {name: rng.uniform(-1, 1, np.shape(part)).astype(np.float32) for name, part in state.items()} if state else ()


def _reference(spec: PolicySpec, policy: Any, observation: Tree, state: Tree) -> dict[str, np.ndarray]:
    """The outputs of the policy itself."""
    batch = len(leaf(observation, next(leaves(spec.observation_space))[0]))
    starts = np.zeros(batch, bool)
    outputs, after = policy.action_outputs(observation, state, starts)
    step = policy.act(observation, state, starts, make_stream(0, "unused"), deterministic=True)
    named = {_dotted("action", part.path): np.asarray(leaf(step.env_actions, part.path)) for part in spec.actions.parts}
    named["logits"] = mask_logits(outputs[:, : spec.actions.num_logits], encode_legal(spec, observation))
    named["means"] = outputs[:, spec.actions.num_logits :]
    if spec.actions.num_gaussians:
        log_std = policy.get_weights()[LOG_STD]
        named["log_std"] = np.clip(log_std, *TANH_LOG_STD_RANGE) if spec.config.action_bounds == "tanh" else log_std
    return named | {f"next_state.{name}": part for name, part in (after.items() if after else ())}


def check_parity(spec: PolicySpec, policy: Any, run: Callable[[Tree, Tree], Outputs], path: Path, tolerance: float) -> float:
    """Compare a written program with the policy on random inputs, in batches of 1 and more; return the largest difference, or raise."""
    worst = 0.0
    for batch in (1, _PROBES):
        observation, state = _probe(spec, policy, batch, seed=batch)
        for step in range(_STEPS):
            expected, found = _reference(spec, policy, observation, state), run(observation, state)
            differences = dict(_differences(spec, expected, found))
            worst = max(worst, *differences.values())
            if not worst <= tolerance:
                name = max(differences, key=lambda name: differences[name])
                path.unlink()
                raise InchwormError(
                    f"{path} was removed: it differs from the policy by {worst:.2g} in {name}, more than tolerance={tolerance:g}; if that "
                    "is rounding (features of 100 and more have that of 1e-5), give a larger one"
                )
            observation, _ = _probe(spec, policy, batch, seed=100 * batch + step)
            state = {name.removeprefix("next_state."): found[name] for name in found if name.startswith("next_state.")} or ()
    return worst


def _differences(spec: PolicySpec, expected: Outputs, found: Outputs) -> Iterator[tuple[str, float]]:
    """The largest difference of each output, absolute below 1 and relative above; discrete actions are compared where no tie is near."""
    logits = expected["logits"]
    decided = np.ones((len(logits), len(spec.actions.groups)), bool)
    for index, group in enumerate(spec.actions.groups):
        ordered = np.sort(logits[:, group], 1)
        decided[:, index] = ordered[:, -1] - ordered[:, max(-2, -ordered.shape[1])] > _TIE
    place = 0
    for part in spec.actions.parts:
        if part.kind == "categorical":
            name, chosen = _dotted("action", part.path), slice(place, place + part.width)
            place += part.width
            differ = np.asarray(expected[name] != found.get(name)).reshape(-1, part.width) & decided[:, chosen]
            yield name, float(np.inf if differ.any() else 0.0)
    for name, ours in expected.items():
        if name in found and np.shape(found[name]) != ours.shape:
            yield name, np.inf
        elif ours.dtype.kind == "f" and ours.size:
            wide = ours.astype(np.float64)
            theirs = np.asarray(found.get(name, np.inf), np.float64)
            yield name, float((np.abs(theirs - wide) / np.maximum(1.0, np.abs(wide))).max())


def _numpy_runs(path: Path) -> Callable[[Tree, Tree], Outputs]:
    """What runs a written `actor.py`, with its outputs under the names of a graph's."""
    program = runpy.run_path(str(path))

    def run(observation: Tree, state: Tree) -> Outputs:
        given = state or None
        outputs = program["outputs"](observation, given)
        action, after = program["act"](observation, given)
        named = {"logits": outputs["logits"], "means": outputs["means"], "log_std": outputs["log_std"]}
        named |= {f"next_state.{name}": part for name, part in (after or {}).items()}

        def flatten(tree: Tree, name: str) -> None:
            if isinstance(tree, dict | tuple):
                for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
                    flatten(inner, f"{name}.{key}")
            else:
                named[name] = tree

        flatten(action, "action")
        return named

    return run
