"""Networks, and the flat tensors that they read and write (steps 4 and 8 of 9), encoded as in `backends/numpy/policy`.

The built-in network is made from a `PolicySpec`; users derive their own from `Network`.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from inchworm.core.errors import RolloutError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import MASK_KEY, build_tree, leaf
from inchworm.core.types import Array, Tree
from inchworm.policy.layout import ActionLayout, MemoryLayout, ObservationLayout, ObservationPart, channels_first
from inchworm.policy.spec import NO_GLOBAL_STATE, PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.sequences import insert_reset_rows

# LSTM and GRU: whole batches of sequences run in one fused kernel.
#
# Kernels do not know about episodes, so where one starts within a sequence, a row is inserted that resets the memory. It has a 1 in an
# extra column whose weights close the gates: σ(-10,000) is exactly 0, and so are the memory after that row and the gradient before it. A
# GRU, whose new memory is then n alone, has n = tanh(b - b) = 0 there.


class GruLayer(torch.autograd.Function):
    """A GRU layer on the CPU with a faster backward pass.

    Sequences [L, N, in] and the memory before them [N, size], which gets no gradient -> features [L, N, size].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, begin: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> Tensor:
        """Run torch's kernel."""
        features = torch.gru(rows, begin[None], [w, u, b, d], True, 1, 0.0, False, False, False)[0]
        ctx.save_for_backward(rows, begin, w, u, b, d, features)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Backpropagate ∂L/∂features [L, N, size] to the rows and the weights."""
        rows, begin, w, u, b, d, features = ctx.saved_tensors
        before = torch.cat([begin[None], features[:-1]])  # [L, N, size] h
        size = before.shape[-1]
        of_input = torch.nn.functional.linear(rows, w, b)  # [L, N, 3 size]
        of_memory = torch.nn.functional.linear(before, u, d)
        opened = (of_input[..., : 2 * size] + of_memory[..., : 2 * size]).sigmoid()
        reset, update = opened[..., :size], opened[..., size:]
        recalled = of_memory[..., 2 * size :]
        new = torch.addcmul(of_input[..., 2 * size :], reset, recalled).tanh()
        # The factors of ∂L/∂features on the way to each gate's sum, for all rows.
        to_new = (1 - update) * (1 - new * new)
        to_update = (before - new) * update * (1 - update)
        to_reset = to_new * recalled * reset * (1 - reset)
        to_sums, to_memory = (torch.stack([to_reset, to_update, last], 2) for last in (to_new, to_new * reset))  # [L, N, 3, size]
        d_features, d_memory = _recursion(gradient, update, to_memory, u)
        d_sums = (d_features[:, :, None] * to_sums).flatten(2).flatten(0, 1)  # [L·N, 3 size]
        flat = d_memory.flatten(0, 1)
        d_rows = (d_sums @ w).reshape(rows.shape) if ctx.needs_input_grad[0] else None
        return d_rows, None, d_sums.t() @ rows.flatten(0, 1), flat.t() @ before.flatten(0, 1), d_sums.sum(0), flat.sum(0)


def _recursion(gradient: Tensor, keep: Tensor, to_memory: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The total ∂L/∂features [L, N, size] and ∂L/∂(U h + d) [L, N, 3 size], from the last row to the first.

    In NumPy, on the same memory: these are many small operations, and each takes twice as long in torch.
    """
    own, kept, factors, matrix = (tensor.detach().numpy() for tensor in (gradient, keep, to_memory, u))
    worth, parts = np.empty_like(own), np.empty_like(factors)
    flat = parts.reshape(*own.shape[:2], -1)
    carried, share = np.zeros_like(own[0]), np.empty_like(own[0])
    for t in range(len(own) - 1, -1, -1):
        np.add(own[t], carried, worth[t])
        np.multiply(worth[t][:, None], factors[t], parts[t])
        np.dot(flat[t], matrix, carried)
        np.multiply(worth[t], kept[t], share)
        np.add(carried, share, carried)
    return torch.from_numpy(worth), torch.from_numpy(flat)


CLOSED = {"lstm": (-1e4, -1e4, 0.0, -1e4), "gru": (-1e4, -1e4)}
"""Weights that close the gates i, f, (g), o and r, z, whatever else is added. For a GRU's n it is the negative of its bias."""


class Past(NamedTuple):
    """The memory of sequences [L, N]."""

    state: Tree
    """[N, layers, size] before the first row."""
    starts: Tensor
    """[L, N] bool: reset before reading this row."""


class Memory(nn.ModuleDict):
    """Recurrent layers under the spec's names. It holds only weights; the state belongs to the caller."""

    closed: Tensor

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__({str(layer): nn.ModuleDict() for layer in range(layout.layers)})
        self.layout = layout
        self.register_buffer("closed", torch.tensor(CLOSED[layout.kind]).repeat_interleave(layout.size)[:, None], persistent=False)
        for name, shape in layout.weights.items():
            _, layer, part, kind = name.split(".")
            parts: nn.ModuleDict = self[layer]  # type: ignore[assignment]
            if part not in parts:
                parts[part] = nn.ParameterDict()
            parts[part][kind] = nn.Parameter(torch.empty(shape))  # type: ignore[operator]

    def forward(self, rows: Tensor, past: Past) -> tuple[Tensor, Tree]:
        """Features [L·N, size] of sequences [L·N, in] that begin with `past`, and the state after the last row.

        Where an episode starts after the first row, the state after the last one is left out: only acting, row by row, needs it.
        """
        rows = rows.reshape(*past.starts.shape, -1)  # [L, N, in]
        resets = past.starts.cpu().numpy()  # shapes depend on it, so this waits for the device
        begin = [past.state[name].to(rows.dtype).transpose(0, 1).contiguous() for name in self.layout.names]  # as kernels read it
        if resets[0].any():
            begin = [torch.where(past.starts[0][:, None], 0.0, part) for part in begin]  # [layers, N, size]
        if not resets[1:].any():
            features, after = self._run(rows, begin)
            return features.flatten(0, 1), {name: part.transpose(0, 1) for name, part in zip(self.layout.names, after)}
        plan, width = insert_reset_rows(resets), rows.shape[1]
        places = torch.from_numpy(plan.places).to(rows.device)
        spread = rows.new_zeros((plan.depth * width, rows.shape[2] + 1))
        spread[:, :-1].index_copy_(0, places, rows.flatten(0, 1))
        spread[torch.from_numpy(plan.inserted).to(rows.device), -1] = 1.0
        features = self._run_with_resets(spread.reshape(plan.depth, width, -1), begin)
        return features.flatten(0, 1).index_select(0, places), ()

    def _run(self, rows: Tensor, begin: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run sequences [L, N, in] without resets; return features [L, N, size] and the state after the last row."""
        layers = [_in_order(layer) for layer in self.values()]
        if self.layout.kind == "lstm" or rows.device.type != "cpu":
            return self._kernel(rows, [weight for layer in layers for weight in layer], begin)
        after = []
        for weights, before in zip(layers, begin[0]):
            rows = GruLayer.apply(rows, before, *weights)  # type: ignore[no-untyped-call]
            after.append(rows[-1])
        return rows, [torch.stack(after)]

    def _run_with_resets(self, rows: Tensor, begin: list[Tensor]) -> Tensor:
        """Run sequences [L, N, in + 1], whose last column is 1 in rows that reset the memory; return features [L, N, size]."""
        resets, size = rows[..., -1:], self.layout.size
        for index, layer in enumerate(self.values()):
            w, u, b, d = _in_order(layer)
            closed = self.closed if self.layout.kind == "lstm" else torch.cat([self.closed, -b[2 * size :, None]])
            weights = [torch.cat([w, closed], 1), u, b, d]
            rows = rows if index == 0 else torch.cat([rows, resets], -1)
            if self.layout.kind == "lstm" or rows.device.type != "cpu":
                rows, _ = self._kernel(rows, weights, [part[index : index + 1] for part in begin])
            else:
                rows = GruLayer.apply(rows, begin[0][index], *weights)  # type: ignore[no-untyped-call]
        return rows

    def _kernel(self, rows: Tensor, weights: list[Tensor], begin: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run torch's kernel with as many layers as there are weights for."""
        options = (True, len(weights) // 4, 0.0, False, False, False)  # biases, layers, dropout, training, two ways, batch first
        if self.layout.kind == "lstm":
            features, *after = torch.lstm(rows, begin, weights, *options)
        else:
            features, *after = torch.gru(rows, begin[0], weights, *options)
        return features, after


def _in_order(layer: nn.Module) -> list[Tensor]:
    """A layer's weights in the order of torch's kernels."""
    return [layer[part][kind] for kind in ("weight", "bias") for part in ("input", "state")]  # type: ignore[index]


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
}

IMAGES_AT_ONCE = 64
"""Images that are convolved together on a CPU without gradients: their activations then stay in its cache."""


def to_tensors(tree: Tree, device: torch.device | str) -> Tree:
    """Every array of a tree as a tensor on `device`."""
    return optree.tree_map(partial(to_tensor, device=device), tree)


def to_tensor(array: Any, device: torch.device | str) -> Tensor:
    """One array as a tensor. Read-only arrays (a rollout's) are copied, because torch has no read-only tensors."""
    if isinstance(array, Tensor):
        return array.to(device)
    array = np.asarray(array)
    if array.dtype in (np.uint16, np.uint32, np.uint64):  # few operations support these
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else np.array(array)).to(device)


def encode_observations(layout: ObservationLayout, observations: Tree, num_leading: int) -> Tensor:
    """Observations [..., *obs] as the flat input [..., F] f32."""
    pieces: list[Tensor] = []
    for part in layout.flat:
        values: Any = reduce(getitem, part.path, observations)
        leading = values.shape[:num_leading]
        if part.kind == "box":
            flat = values.to(torch.float32).reshape(*leading, part.size)
            pieces.append(flat if part.scale == 1.0 else flat * part.scale)
            continue
        entries = values.reshape(*leading, len(part.sizes))
        for index, (start, size) in enumerate(zip(part.starts, part.sizes)):
            # torch's one_hot would read on the host whether every entry is in range, which the rollout's checks have done.
            hot = entries[..., index, None] == torch.arange(start, start + size, device=values.device)
            pieces.append(hot.to(torch.float32))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def channels_together(images: Tensor) -> Tensor:
    """The same images [N, channels, height, width] with the channels of a pixel adjacent in memory.

    Convolutions then take two thirds of the time with gradients. Done before bytes become floats, which takes a quarter of the memory.
    """
    if not images.is_contiguous():  # a view of images whose channels are last
        return images
    return torch.stack(images.unbind(1), dim=-1).permute(0, 3, 1, 2)


def encode_mask(layout: ActionLayout, mask: Tree, num_leading: int) -> Tensor:
    """A tree of action masks as one bool tensor [..., C]."""
    pieces = [part.reshape(*part.shape[:num_leading], -1) != 0 for part in layout.mask_leaves(mask)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def encode_legal(spec: PolicySpec, observations: Tree, num_leading: int) -> Tensor | None:
    """The action mask [..., C] of observations, with the dimensions that their agents have [..., C + D] where they tell; else None."""
    mask = encode_mask(spec.actions, observations[MASK_KEY], num_leading) if spec.observations.has_mask else None
    if not spec.has_dimensions:
        return mask
    has = observations[DIMENSIONS_KEY] != 0  # [..., D]
    return torch.cat([has.new_ones((*has.shape[:-1], spec.actions.num_logits)) if mask is None else mask, has], dim=-1)


def flatten_actions(layout: ActionLayout, actions: Tree, num_leading: int) -> tuple[Tensor, Tensor]:
    """A tree of actions as choices [..., G] counted from 0 and Gaussian values [..., D]."""
    choices: list[Tensor] = []
    gaussians: list[Tensor] = []
    for part in layout.parts:
        values = leaf(actions, part.path)
        values = values.reshape(*values.shape[:num_leading], part.width)
        if part.kind == "categorical":
            counted = values.long()
            choices.append(counted - torch.from_numpy(np.array(part.starts)).to(values.device) if part.starts.any() else counted)
        else:
            gaussians.append(values.to(torch.float32))
    empty = values[..., :0]
    joined = [
        torch.cat(parts, -1) if len(parts) > 1 else (parts[0] if parts else none)
        for parts, none in ((choices, empty.long()), (gaussians, empty.float()))
    ]
    return joined[0], joined[1]


def unflatten_actions(layout: ActionLayout, choices: Tensor, gaussians: Tensor, *, sampled: bool = True) -> Tree:
    """Flat actions [..., G] and [..., D] as the space's tree, as in `ActionLayout.unflatten`."""
    pieces: dict[Any, Tensor] = {}
    group = dimension = 0
    for part in layout.parts:
        if part.kind == "categorical":
            values = choices[..., group : group + part.width]
            values = values + torch.from_numpy(np.array(part.starts)).to(values.device) if part.starts.any() else values
            group += part.width
        else:
            values = gaussians[..., dimension : dimension + part.width]
            dimension += part.width
        dtype = part.sampled_dtype if sampled else part.dtype
        pieces[part.path] = values.reshape(*values.shape[:-1], *part.shape).to(torch.from_numpy(np.empty(0, dtype)).dtype)
    return pieces[()] if () in pieces else build_tree(layout.space, lambda path, _: pieces[path])


def merge_leading(tree: Tree) -> tuple[Tree, tuple[int, int]]:
    """[L, N, …] as [L·N, …], which is what networks read; and (L, N)."""
    first = optree.tree_leaves(tree)[0]
    return optree.tree_map(lambda leaf: leaf.flatten(0, 1), tree), (first.shape[0], first.shape[1])


class Central(NamedTuple):
    """Observations with what only a central critic reads, as one tree, so that both are cut and flattened together."""

    observations: Tree
    global_state: Tree
    valid: Tensor


def with_world(observations: Tree, global_state: Tree, valid: Array | None) -> Tree:
    """Observations [L, N, *obs] with `lane_states` [L, N, …] and `valid` [L, N], all true by default."""
    first = optree.tree_leaves(observations)[0]
    if isinstance(global_state, tuple) and not global_state:
        raise RolloutError(NO_GLOBAL_STATE)
    alive = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device) if valid is None else to_tensor(valid, first.device)
    return Central(observations, to_tensors(global_state, first.device), alive)


class Network(nn.Module):
    """The interface of a network of `TorchPolicy`: outputs for the action distribution, and values.

    Observations are the environment's tree of tensors [N, *obs], raw and without the action mask. Override
    `forward` too where actor and critic share work.
    """

    def action_outputs(self, observations: Tree) -> Tensor:  # noqa: ARG002
        """[N, C + D]: logits of all discrete choices, then means of the continuous ones."""
        raise TypeError(f"{type(self).__name__} must define action_outputs(observations) -> Tensor [N, outputs]")

    def values(self, observations: Tree) -> Tensor:  # noqa: ARG002
        """[N] in reward units, or normalised if the policy has a value normaliser."""
        raise TypeError(f"{type(self).__name__} must define values(observations) -> Tensor [N]")

    def forward(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Both at once."""
        return self.action_outputs(observations), self.values(observations)


class SpecNetwork(Network):
    """The built-in network: convolutions for images, then actor and critic, with separate trunks or a shared one, and a memory.

    With a memory, rows [L·N, …] are flattened sequences, and `past` is their memory.
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
        self._is_tanh = spec.config.activation == "tanh"
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
        """Copy the normalisers' current numbers."""
        self.value_mean.fill_(statistics.value_mean)
        self.value_std.fill_(statistics.value_std)
        for prefix, scale in (("", statistics.observation_scale), ("global_", statistics.global_scale)):
            if scale is not None:
                for name, vector in zip(("center", "inverse_std"), scale):
                    self.get_buffer(prefix + name).copy_(torch.from_numpy(vector))

    def action_outputs(self, observations: Tree, past: Past | None = None) -> Tensor:
        """[N, C + D]"""
        return self.step_outputs(observations, past)[0]

    def step_outputs(self, observations: Tree, past: Past | None) -> tuple[Tensor, Tree]:
        """[N, C + D], and the memory after the last row."""
        features, after = self._features(observations, past)
        return self._head(self.actor, features), after

    def values(self, observations: Tree, past: Past | None = None) -> Tensor:
        """[N]"""
        return self._critic(observations, self._features(observations, past)[0])

    def forward(self, observations: Tree, past: Past | None = None) -> tuple[Tensor, Tensor]:
        """Both, from one pass through the layers that they share."""
        features, _ = self._features(observations, past)
        return self._head(self.actor, features), self._critic(observations, features)

    def _critic(self, observations: Tree, features: Tensor) -> Tensor:
        """[N] from the features, which are 0 for invalid agents, and the global state if the critic is central."""
        if self.spec.global_state is not None:
            if not isinstance(observations, Central):
                raise RolloutError(NO_GLOBAL_STATE)
            world = encode_observations(self.spec.global_state, observations.global_state, 1).to(features.dtype)
            if self.spec.config.normalize_observations:
                limit = self.spec.config.observation_clip
                world = ((world - self.global_center) * self.global_inverse_std).clamp(-limit, limit)
            features = torch.cat([features * observations.valid[:, None], world], -1)  # [N, F + G]
        return self._head(self.critic, features).squeeze(-1)

    def _features(self, observations: Tree, past: Past | None) -> tuple[Tensor, Tree]:
        """[N, width] the features that actor and critic share, and the memory after the last row.

        Observations are encoded and normalised and images convolved; then come the memory and the trunk, if there are any.
        """
        layout, pieces = self.spec.observations, []
        observations = observations.observations if isinstance(observations, Central) else observations
        if layout.size:
            flat = encode_observations(layout, observations, 1).to(self.center.dtype)
            if self.spec.config.normalize_observations:
                limit = self.spec.config.observation_clip
                flat = ((flat - self.center) * self.inverse_std).clamp(-limit, limit)
            pieces.append(flat)
        pieces += [self._read_image(part, stack, leaf(observations, part.path)) for part, stack in zip(layout.images, self.cnn.values())]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)  # [N, F]
        after: Tree = ()
        if self.memory is not None and past is not None and not self.spec.memory_is_last:
            rows, after = self.memory(rows, past)
        for layer in self.trunk.values():
            rows = self._activate(layer(rows))
        if self.memory is not None and past is not None and self.spec.memory_is_last:
            rows, after = self.memory(rows, past)
        return rows, after

    def _activate(self, features: Tensor) -> Tensor:
        """The activation; while acting on a CPU, tanh is NumPy's, in the same memory, which takes a quarter of the time of torch's."""
        if self._is_tanh and torch.is_inference_mode_enabled() and features.device.type == "cpu":
            array = features.numpy()
            np.tanh(array, out=array)
            return features
        activated: Tensor = self.activation(features)
        return activated

    def _head(self, stack: nn.Module, features: Tensor) -> Tensor:
        *hidden, head = stack.values()  # type: ignore[operator]
        for layer in hidden:
            features = self._activate(layer(features))
        outputs: Tensor = head(features)
        return outputs

    def _read_image(self, part: ObservationPart, stack: nn.Module, raw: Tensor) -> Tensor:
        """[N, features] of images [N, *image]."""
        images = raw if channels_first(part.shape) else raw.permute(0, 3, 1, 2)  # [N, channels, height, width]
        if torch.is_grad_enabled():
            return self._convolve(part, stack, channels_together(images))
        at_once = images.device.type != "cpu" or torch.compiler.is_exporting()
        chunks = (images,) if at_once else torch.split(images, IMAGES_AT_ONCE)
        features = [self._convolve(part, stack, chunk) for chunk in chunks]
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
            stack[key] = Dense(shape) if len(shape) == 2 else Convolution(shape, spec.config.cnn_filters[int(key)][2])
    return stack


class Dense(nn.Linear):
    """A linear layer without initialisation: weights always come from the spec, and torch's global generator is not used."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[0])

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""

    def in_columns(self, inputs: Tensor) -> Tensor:
        """The same product, transposed: for 8 to 32 rows of thousands of numbers a CPU takes two thirds of the time."""
        return torch.addmm(self.bias[:, None], self.weight, inputs.t()).t()


class Convolution(nn.Conv2d):
    """A convolution without initialisation."""

    def __init__(self, shape: tuple[int, ...], stride: int) -> None:
        super().__init__(shape[1], shape[0], shape[2:], stride)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        """[N, in, height, width], each number times `scale`, -> [N, out, height, width]"""
        weight = self.weight if scale == 1.0 else self.weight * scale  # a few thousand numbers instead of the images' millions
        return nn.functional.conv2d(inputs, weight, self.bias, self.stride)
