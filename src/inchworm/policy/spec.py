"""An architecture as data: spaces, sizes and options from which every backend builds the same network. Serves steps 4 and 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.config import PolicyConfig
from inchworm.errors import SpaceError
from inchworm.policy.layout import (
    ActionLayout,
    ObservationLayout,
    ObservationPart,
    action_layout,
    check_mask_space,
    observation_layout,
)
from inchworm.spaces import Path, Space, build_tree, leaf, leaf_dtype, leaf_shape, path_name, space_from_dict, space_to_dict
from inchworm.types import Tree

LOG_STD = "log_std"
TANH_LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the log standard deviation under tanh, where a wider Gaussian only piles up at the edges."""

_MAX_LAYERS = 1_000  # that a description may ask for


@dataclass(frozen=True)
class PolicySpec:
    """A policy without its weights."""

    observation_space: Space
    action_space: Space
    config: PolicyConfig

    def __post_init__(self) -> None:
        check_mask_space(self.observation_space, self.actions)

    @cached_property
    def observations(self) -> ObservationLayout:
        """How an observation becomes the network's input."""
        return observation_layout(self.observation_space, convolutions=self.config.kind == "cnn")

    @cached_property
    def actions(self) -> ActionLayout:
        """How the network's output becomes an action."""
        return action_layout(self.action_space, self.config.action_bounds)

    @cached_property
    def input_size(self) -> int:
        """Width of what the first dense layer reads."""
        return self.observations.size + self.config.cnn_features * len(self.observations.images)

    def image_name(self, part: ObservationPart) -> str:
        """Under which name the convolutions of an image keep their weights."""
        return f"cnn.{path_name(part.path).replace('.', '_')}"

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape: dense [out, in], convolution [out, in, kernel, kernel], bias [out]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self.observations.images:
            shapes |= _convolutions(self.image_name(part), part.shape, self.config)
        hidden = self.config.hidden_sizes
        if self.config.shared_trunk:
            shapes |= _dense("trunk", self.input_size, hidden)
            head_input = hidden[-1] if hidden else self.input_size
            heads: dict[str, tuple[int, tuple[int, ...]]] = {"actor": (head_input, ()), "critic": (head_input, ())}
        else:
            heads = {"actor": (self.input_size, hidden), "critic": (self.input_size, hidden)}
        for name, outputs in (("actor", self.actions.num_outputs), ("critic", 1)):
            width, sizes = heads[name]
            shapes |= _dense(name, width, sizes)
            last = sizes[-1] if sizes else width
            shapes |= {f"{name}.head.weight": (outputs, last), f"{name}.head.bias": (outputs,)}
        if self.actions.num_gaussians:
            shapes[LOG_STD] = (self.actions.num_gaussians,)
        return shapes

    def batch(self, observation: Tree) -> Tree:
        """One observation with a batch axis in front, refused in words where it is not of the space's shape."""

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
        return build_tree(self.action_space, lambda path, space: _one_action(leaf(actions, path)[0], space))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        return {
            "observation_space": space_to_dict(self.observation_space),
            "action_space": space_to_dict(self.action_space),
            "config": self.config.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpec:
        """The spec that `to_dict` described."""
        config = PolicyConfig.from_dict(data["config"])
        if len(config.hidden_sizes) + len(config.cnn_filters) > _MAX_LAYERS:
            raise SpaceError(f"a file describes a policy of more than {_MAX_LAYERS} layers")
        return cls(space_from_dict(data["observation_space"]), space_from_dict(data["action_space"]), config)


def _one_action(value: Any, space: Space) -> Any:
    return int(value) if isinstance(space, spaces.Discrete) else np.asarray(value)


def _dense(name: str, width: int, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, size in enumerate(sizes):
        shapes |= {f"{name}.{index}.weight": (size, width), f"{name}.{index}.bias": (size,)}
        width = size
    return shapes


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels are its first axis: the smaller of its two ends (4x84x84), else they are its last (96x96x3)."""
    return shape[0] <= shape[2]


def _convolutions(name: str, shape: tuple[int, ...], config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    channels, height, width = shape if channels_first(shape) else (shape[2], shape[0], shape[1])
    for index, (filters, kernel, stride) in enumerate(config.cnn_filters):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if height < 1 or width < 1:
            raise SpaceError(
                f"the image {shape} is too small for policy.cnn_filters={config.cnn_filters}: nothing is left after layer {index}; "
                "give smaller kernels and strides, such as ((16, 3, 1), (32, 3, 1))"
            )
        shapes |= {f"{name}.{index}.weight": (filters, channels, kernel, kernel), f"{name}.{index}.bias": (filters,)}
        channels = filters
    flat = channels * height * width
    return {**shapes, f"{name}.head.weight": (config.cnn_features, flat), f"{name}.head.bias": (config.cnn_features,)}


def initial_weights(spec: PolicySpec, stream: np.random.Generator) -> dict[str, np.ndarray]:
    """Fresh parameters, the same for every backend.

    Orthogonal with gain sqrt 2 for hidden layers, 0.01 for the action head (so that the first policy is nearly uniform) and 1 for
    the value head; biases 0 (Engstrom et al. 2020, appendix A). Otherwise uniform in ±1/sqrt(fan-in).
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
            weights[name] = _orthogonal(shape, _gain(name), stream)
    return weights


def _gain(name: str) -> float:
    return {"actor.head.weight": 0.01, "critic.head.weight": 1.0}.get(name, float(np.sqrt(2)))


def _orthogonal(shape: tuple[int, ...], gain: float, stream: np.random.Generator) -> np.ndarray:
    rows, columns = shape[0], int(np.prod(shape[1:]))
    gaussian = stream.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diag(r))  # makes the distribution uniform over orthogonal matrices
    matrix = q if rows >= columns else q.T
    return np.ascontiguousarray(gain * matrix.reshape(shape), np.float32)
