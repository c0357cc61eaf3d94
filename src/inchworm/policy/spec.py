"""An architecture as data: the spaces, sizes and options from which every backend builds the same network (steps 4 and 8 of 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import SpaceError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import (
    PLACE,
    WORLD,
    Path,
    Space,
    build_tree,
    leaf,
    leaf_dtype,
    leaf_shape,
    path_name,
    space_from_dict,
    space_to_dict,
)
from inchworm.core.types import Tree
from inchworm.policy.layout import (
    FORGET_GATE,
    GATES,
    MEMORY_KINDS,
    ActionLayout,
    MemoryLayout,
    ObservationLayout,
    ObservationPart,
    action_layout,
    channels_first,
    check_mask_space,
    height_and_width,
    observation_layout,
    smallest_image,
)

VERSION = "policy_version"
"""The name under which weights hold the number of the update that they are from."""
LOG_STD = "log_std"
TANH_LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the log standard deviation under tanh, where a wider Gaussian only piles up at the bounds."""

NO_GLOBAL_STATE = (
    "policy.central_critic needs a global state, and there is none; collect from a vector env that was made with global_state=True"
)

SMALL_FILTERS = (((16, 3, 1), (32, 3, 1)), ((16, 2, 1),))
"""What to use for images that are too small for `policy.cnn_filters`."""
_MAX_LAYERS, _MOST_LANES = 1_000, 10_000  # that a description may ask for


@dataclass(frozen=True)
class PolicySpec:
    """A policy without its weights."""

    observation_space: Space
    action_space: Space
    config: PolicyConfig
    global_state_space: Space | None = None
    """The global state that a central critic reads in addition to the observation; None without a central critic."""
    lanes_per_copy: int = 1
    """Lanes that share a global state; if there are several, a central critic also reads the number of the lane."""

    def __post_init__(self) -> None:
        check_mask_space(self.observation_space, self.actions)
        if not self.config.central_critic:
            object.__setattr__(self, "global_state_space", None)  # the environment may offer one that is not read
            object.__setattr__(self, "lanes_per_copy", 1)
        elif self.global_state_space is None:
            raise SpaceError(
                "policy.central_critic needs a global state, and there is none; use an environment with state() and make it with "
                "global_state=True, or set policy.central_critic=false"
            )

    @cached_property
    def observations(self) -> ObservationLayout:
        """How an observation becomes the network's input."""
        kind, space = self.config.kind, self.observation_space
        # Of a memory, convolutions were not asked for: an image that is too small for them, such as a board, is flattened as for an MLP.
        smallest = None if kind == "mlp" else 1 if kind == "cnn" else smallest_image(self.config.cnn_filters)
        layout = observation_layout(space, smallest)
        if kind == "cnn" and not layout.images:
            raise SpaceError(f'policy.kind="cnn" needs an image (a Box of rank 3) in the observation space, which is {space}; use "mlp"')
        return layout

    @cached_property
    def global_state(self) -> ObservationLayout | None:
        """How `lane_states` become the critic's input, images flattened; None without a central critic."""
        if self.global_state_space is None:
            return None
        place = {PLACE: spaces.Discrete(self.lanes_per_copy)} if self.lanes_per_copy > 1 else {}
        return observation_layout(spaces.Dict({WORLD: self.global_state_space, **place}))

    @cached_property
    def actions(self) -> ActionLayout:
        """How the network's output becomes an action."""
        return action_layout(self.action_space, self.config.action_bounds)

    @cached_property
    def has_dimensions(self) -> bool:
        """Whether observations tell which continuous dimensions of the action their agent has."""
        observed = self.observation_space.spaces if isinstance(self.observation_space, spaces.Dict) else {}
        return DIMENSIONS_KEY in observed and observed[DIMENSIONS_KEY] == spaces.MultiBinary(self.actions.num_gaussians)

    @cached_property
    def input_size(self) -> int:
        """Width of what the first dense layer reads."""
        return self.observations.size + self.config.cnn_features * len(self.observations.images)

    @cached_property
    def memory(self) -> MemoryLayout | None:
        """The memory that actor and critic share; None for a policy without memory."""
        config = self.config
        if config.kind not in MEMORY_KINDS:
            return None
        inputs = _width(self.input_size, config.hidden_sizes) if self.memory_is_last else self.input_size
        kind: Any = config.kind
        return MemoryLayout(kind, inputs, config.memory_size, config.memory_layers)

    @cached_property
    def memory_is_last(self) -> bool:
        """Whether the memory comes right before the heads; the hidden layers before it are then a shared trunk."""
        return self.config.kind in MEMORY_KINDS and self.config.memory_place == "after"

    def image_name(self, part: ObservationPart) -> str:
        """The prefix of the weights of an image's convolutions."""
        return f"cnn.{path_name(part.path).replace('.', '_')}"

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape: dense [out, in], convolution [out, in, kernel, kernel], bias [out]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self.observations.images:
            shapes |= _convolutions(self.image_name(part), part.shape, self.config)
        width, own = self.input_size, self.config.hidden_sizes
        if self.memory is not None and not self.memory_is_last:
            shapes |= self.memory.weights
            width = self.memory.size
        if self.config.shared_trunk or self.memory_is_last:
            shapes |= _dense("trunk", width, own)
            width, own = _width(width, own), ()
        if self.memory is not None and self.memory_is_last:
            shapes |= self.memory.weights
            width = self.memory.size
        for name, outputs in (("actor", self.actions.num_outputs), ("critic", 1)):
            if name == "critic" and self.global_state is not None:  # always separate layers: a linear map of the state is too weak
                width, own = width + self.global_state.size, self.config.hidden_sizes
            shapes |= _dense(name, width, own)
            shapes |= {f"{name}.head.weight": (outputs, _width(width, own)), f"{name}.head.bias": (outputs,)}
        if self.actions.num_gaussians:
            shapes[LOG_STD] = (self.actions.num_gaussians,)
        return shapes

    def batch(self, observation: Tree) -> Tree:
        """Add a batch axis to one observation; raise where its shape is not the space's."""

        def one(path: Path, space: Space) -> np.ndarray:
            try:
                value = np.asarray(leaf(observation, path), leaf_dtype(space))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise SpaceError(
                    f"predict needs one observation of {self.observation_space}; {path_name(path)} is missing or wrong"
                ) from error
            if value.shape != leaf_shape(space):
                raise SpaceError(f"predict needs {path_name(path)} of shape {leaf_shape(space)} for one observation, not {value.shape}")
            return value[None]

        return build_tree(self.observation_space, one)

    def unbatch(self, actions: Tree) -> Tree:
        """The first action of a batch; a Discrete one as a plain int."""

        def first(path: Path, space: Space) -> Any:
            value = leaf(actions, path)[0]
            return int(value) if isinstance(space, spaces.Discrete) else np.asarray(value)

        return build_tree(self.action_space, first)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `from_dict`."""
        described: dict[str, Any] = {
            "observation_space": space_to_dict(self.observation_space),
            "action_space": space_to_dict(self.action_space),
            "config": self.config.to_dict(),
        }
        if self.global_state_space is not None:
            described |= {"global_state_space": space_to_dict(self.global_state_space), "lanes_per_copy": self.lanes_per_copy}
        return described

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpec:
        """Restore the spec from what `to_dict` returned."""
        config = PolicyConfig.from_dict(data["config"])
        if len(config.hidden_sizes) + len(config.cnn_filters) > _MAX_LAYERS:
            raise SpaceError(f"a file describes a policy of more than {_MAX_LAYERS} layers")
        read = (space_from_dict(data["observation_space"]), space_from_dict(data["action_space"]))
        if not config.central_critic:
            return cls(*read, config)
        if type(data["lanes_per_copy"]) is not int or not 1 <= data["lanes_per_copy"] <= _MOST_LANES:
            raise SpaceError(f"a file describes a policy for {data['lanes_per_copy']!r:.80} lanes per copy")
        return cls(*read, config, space_from_dict(data["global_state_space"]), data["lanes_per_copy"])


def _width(inputs: int, sizes: Sequence[int]) -> int:
    """Width of the output of hidden layers of these sizes."""
    return sizes[-1] if sizes else inputs


def _dense(name: str, width: int, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, size in enumerate(sizes):
        shapes |= {f"{name}.{index}.weight": (size, width), f"{name}.{index}.bias": (size,)}
        width = size
    return shapes


def _convolutions(name: str, shape: tuple[int, ...], config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    channels, (height, width) = shape[0] if channels_first(shape) else shape[2], height_and_width(shape)
    if min(height, width) < (least := smallest_image(config.cnn_filters)):
        small = [filters for filters in SMALL_FILTERS if smallest_image(filters) <= min(height, width)]
        use = f"use policy.cnn_filters={[list(one) for one in small[0]]} or policy.kind=mlp" if small else "use policy.kind=mlp"
        raise SpaceError(f"the image {shape} is too small for policy.cnn_filters, which need {least}x{least} or more; {use}")
    for index, (filters, kernel, stride) in enumerate(config.cnn_filters):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        shapes |= {f"{name}.{index}.weight": (filters, channels, kernel, kernel), f"{name}.{index}.bias": (filters,)}
        channels = filters
    flat = channels * height * width
    return {**shapes, f"{name}.head.weight": (config.cnn_features, flat), f"{name}.head.bias": (config.cnn_features,)}


def initial_weights(spec: PolicySpec, stream: np.random.Generator) -> dict[str, np.ndarray]:
    """Initial parameters, the same for every backend.

    Orthogonal with gain sqrt 2 for hidden layers, 0.01 for the action head (so that the first policy is nearly uniform) and 1 for
    the value head; biases 0 (Engstrom et al. 2020, appendix A). Each gate of a memory is orthogonal by itself with gain 1, and an
    LSTM's forget gates begin with the bias `lstm_forget_bias`. Otherwise uniform in ±1/sqrt(fan-in).
    """
    weights: dict[str, np.ndarray] = {}
    for name, shape in spec.layers.items():
        if name == LOG_STD:
            weights[name] = np.full(shape, spec.config.log_std_init, np.float32)
        elif not spec.config.orthogonal_init:
            fan_in = int(np.prod(spec.layers[name.removesuffix("bias").removesuffix("weight") + "weight"][1:]))
            weights[name] = stream.uniform(-1, 1, shape).astype(np.float32) / np.float32(np.sqrt(fan_in))
        elif name.endswith("bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            is_memory = name.startswith("memory.")
            gates = GATES[spec.config.kind] if is_memory else 1
            gain = 1.0 if is_memory else {"actor.head.weight": 0.01, "critic.head.weight": 1.0}.get(name, float(np.sqrt(2)))
            block = (shape[0] // gates, *shape[1:])
            weights[name] = np.concatenate([_orthogonal(block, gain, stream) for _ in range(gates)])
    if spec.memory is not None and spec.memory.kind == "lstm" and spec.config.orthogonal_init:
        for layer in range(spec.memory.layers):  # open gates remember at first (Jozefowicz et al. 2015, section 2.2)
            gate = slice(FORGET_GATE * spec.memory.size, (FORGET_GATE + 1) * spec.memory.size)
            weights[f"memory.{layer}.input.bias"][gate] = spec.config.lstm_forget_bias
    return weights


def _orthogonal(shape: tuple[int, ...], gain: float, stream: np.random.Generator) -> np.ndarray:
    rows, columns = shape[0], int(np.prod(shape[1:]))
    gaussian = stream.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diag(r))  # makes the distribution uniform over orthogonal matrices
    matrix = q if rows >= columns else q.T
    return np.ascontiguousarray(gain * matrix.reshape(shape), np.float32)
