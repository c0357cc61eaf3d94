"""Serves steps 4 and 8 of 9: networks. The built-in one is made from a `PolicySpec`; people bring theirs as a `Network`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inchworm.backends.torch.encoding import Central, beside, channels_together, encode_image, encode_observations
from inchworm.backends.torch.memory import Memory, Past
from inchworm.core.spaces import leaf
from inchworm.core.types import Tree
from inchworm.policy.layout import ObservationPart
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
}

IMAGES_AT_ONCE = 64
"""Whose convolutions run together on a CPU where nobody learns: what they hand on then stays in its cache."""


class Network(nn.Module):
    """What `TorchPolicy` asks of a network: outputs for the action distribution, and values.

    Observations come as the environment's tree of tensors [N, *obs], raw and without the action mask. Override
    `forward` too where actor and critic share work.
    """

    def action_outputs(self, observations: Tree) -> Tensor:  # noqa: ARG002
        """[N, C + D]: logits of all discrete choices, then means of the continuous ones."""
        raise TypeError(f"{type(self).__name__} must define action_outputs(observations) -> Tensor [N, outputs]")

    def values(self, observations: Tree) -> Tensor:  # noqa: ARG002
        """[N] in reward units, or normalised where the policy has a value normaliser."""
        raise TypeError(f"{type(self).__name__} must define values(observations) -> Tensor [N]")

    def forward(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Both at once."""
        return self.action_outputs(observations), self.values(observations)


class SpecNetwork(Network):
    """The built-in network: convolutions for images, then actor and critic, with separate trunks or a shared one, and a memory.

    With a memory, rows [L·N, …] are sequences laid flat, and `past` says what they remember.
    """

    center: Tensor
    inverse_std: Tensor
    global_center: Tensor
    global_inverse_std: Tensor
    value_mean: Tensor
    value_std: Tensor

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        self.activation = ACTIVATIONS[spec.config.activation]()
        self.cnn = nn.ModuleDict()
        for part in spec.observations.images:
            self.cnn[spec.image_name(part).removeprefix("cnn.")] = _stack(spec, spec.image_name(part))
        self.trunk = _stack(spec, "trunk")
        self.memory = None if spec.memory is None else Memory(spec.memory)
        self.actor = _stack(spec, "actor")
        self.critic = _stack(spec, "critic")
        self.register_buffer("center", torch.zeros(spec.observations.size), persistent=False)
        self.register_buffer("inverse_std", torch.ones(spec.observations.size), persistent=False)
        if spec.global_state is not None:
            self.register_buffer("global_center", torch.zeros(spec.global_state.size), persistent=False)
            self.register_buffer("global_inverse_std", torch.ones(spec.global_state.size), persistent=False)
        self.register_buffer("value_mean", torch.zeros(()), persistent=False)
        self.register_buffer("value_std", torch.ones(()), persistent=False)

    def set_statistics(self, statistics: PolicyStatistics) -> None:
        """Take the normalisers' numbers as they are now."""
        self.value_mean.fill_(statistics.value_mean)
        self.value_std.fill_(statistics.value_std)
        if statistics.observations is not None:
            self.center.copy_(torch.from_numpy(statistics.center))
            self.inverse_std.copy_(torch.from_numpy(statistics.inverse_std))
        if statistics.global_state is not None:
            self.global_center.copy_(torch.from_numpy(statistics.global_center))
            self.global_inverse_std.copy_(torch.from_numpy(statistics.global_inverse_std))

    def action_outputs(self, observations: Tree, past: Past | None = None) -> Tensor:
        """[N, C + D]"""
        return self._head(self.actor, self._features(observations, past))

    def step_outputs(self, observations: Tree, past: Past) -> tuple[Tensor, Tree]:
        """[N, C + D] for one row [1, N] of each lane, and what is remembered after it."""
        assert self.memory is not None
        rows = self._inputs(observations)
        rows = self._hidden(rows) if self.spec.memory_is_last else rows
        features, after = self.memory.step(rows, past.state, past.starts[0])
        return self._head(self.actor, features if self.spec.memory_is_last else self._hidden(features)), after

    def values(self, observations: Tree, past: Past | None = None) -> Tensor:
        """[N]"""
        return self._critic(observations, self._features(observations, past))

    def forward(self, observations: Tree, past: Past | None = None) -> tuple[Tensor, Tensor]:
        """Both from one pass of what they share."""
        features = self._features(observations, past)
        return self._head(self.actor, features), self._critic(observations, features)

    def _critic(self, observations: Tree, features: Tensor) -> Tensor:
        """[N] from the features, and where the critic is central from the world's state."""
        if self.spec.global_state is not None:
            limit = self.spec.config.observation_clip if self.spec.config.normalize_observations else None
            features = beside(features, observations, self.spec.global_state, self.global_center, self.global_inverse_std, limit)
        return self._head(self.critic, features).squeeze(-1)

    def _features(self, observations: Tree, past: Past | None) -> Tensor:
        """[N, width] what actor and critic share."""
        rows = self._inputs(observations)
        if self.memory is None or past is None:
            return self._hidden(rows)
        rows = self._hidden(rows) if self.spec.memory_is_last else rows
        features = self.memory.over(rows.reshape(*past.starts.shape, -1), *past).flatten(0, 1)
        return features if self.spec.memory_is_last else self._hidden(features)

    def _hidden(self, rows: Tensor) -> Tensor:
        """The layers of the trunk, if there is one."""
        for layer in self.trunk.values():
            rows = self.activation(layer(rows))
        return rows

    def _inputs(self, observations: Tree) -> Tensor:
        """[N, F] what the first layer reads: encoded, normalised, images convolved."""
        layout, pieces = self.spec.observations, []
        observations = observations.observations if isinstance(observations, Central) else observations
        if layout.size:
            flat = encode_observations(layout, observations, 1).to(self.center.dtype)
            if self.spec.config.normalize_observations:
                limit = self.spec.config.observation_clip
                flat = ((flat - self.center) * self.inverse_std).clamp(-limit, limit)
            pieces.append(flat)
        for part, stack in zip(layout.images, self.cnn.values()):
            pieces.append(self._image_features(part, stack, encode_image(part, leaf(observations, part.path))))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def _head(self, stack: nn.Module, features: Tensor) -> Tensor:
        *hidden, head = stack.values()  # type: ignore[operator]
        for layer in hidden:
            features = self.activation(layer(features))
        outputs: Tensor = head(features)
        return outputs

    def _image_features(self, part: ObservationPart, stack: nn.Module, images: Tensor) -> Tensor:
        """[N, features], with the order in memory and the number at once that are fastest for what is asked."""
        if torch.is_grad_enabled():
            return self._convolve(part, stack, channels_together(images))
        pieces = torch.split(images, IMAGES_AT_ONCE) if images.device.type == "cpu" else (images,)
        features = [self._convolve(part, stack, piece) for piece in pieces]
        return features[0] if len(features) == 1 else torch.cat(features)

    def _convolve(self, part: ObservationPart, stack: nn.Module, images: Tensor) -> Tensor:
        *convolutions, head = stack.values()  # type: ignore[operator]
        numbers = images.to(self.center.dtype)
        if not convolutions:
            return torch.relu(head(numbers.flatten(1) * part.scale))
        hidden = convolutions[0](numbers, part.scale)
        for layer in convolutions[1:]:
            hidden = layer(hidden.relu_())  # in place: nothing else reads a convolution's output
        flat = torch.relu(hidden.flatten(1))
        return torch.relu(head(flat) if torch.is_grad_enabled() else head.in_columns(flat))


def _stack(spec: PolicySpec, prefix: str) -> nn.ModuleDict:
    """The layers whose weights the spec names `prefix.*`, in order."""
    stack = nn.ModuleDict()
    for name, shape in spec.layers.items():
        if name.startswith(f"{prefix}.") and name.endswith(".weight"):
            key = name.removeprefix(f"{prefix}.").removesuffix(".weight")
            stack[key] = _layer(spec, key, shape)
    return stack


def _layer(spec: PolicySpec, key: str, shape: tuple[int, ...]) -> nn.Module:
    return Dense(shape) if len(shape) == 2 else Convolution(shape, spec.config.cnn_filters[int(key)][2])


class Dense(nn.Module):
    """A linear layer without initial numbers: they always come from the spec's own, and torch's global stream is left alone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))  # [out, in]
        self.bias = nn.Parameter(torch.empty(shape[0]))

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        return nn.functional.linear(inputs, self.weight, self.bias)

    def in_columns(self, inputs: Tensor) -> Tensor:
        """The same product the other way round: for 8 to 32 rows of some thousand numbers a CPU needs two thirds of the time."""
        return torch.addmm(self.bias[:, None], self.weight, inputs.t()).t()


class Convolution(Dense):
    """The same for images."""

    def __init__(self, shape: tuple[int, ...], stride: int) -> None:
        super().__init__(shape)  # [out, in, kernel, kernel]
        self.stride = stride

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        """[N, in, height, width], each number times `scale`, -> [N, out, height, width]"""
        weight = self.weight if scale == 1.0 else self.weight * scale  # a few thousand numbers instead of the images' millions
        return nn.functional.conv2d(inputs, weight, self.bias, self.stride)
