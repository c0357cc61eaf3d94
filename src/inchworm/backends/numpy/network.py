"""Dense networks with forward and backward pass (steps 8 and 9 of 9): all the backpropagation that PPO needs.

One layer computes y = f(z) with z = x Wᵀ + b. Given the gradient of the loss by the layer's output, G = ∂L/∂y, the chain rule gives

    ∂L/∂z = G · f'(z)           element by element
    ∂L/∂W = (∂L/∂z)ᵀ x          a sum over samples
    ∂L/∂b = Σ over samples of ∂L/∂z
    ∂L/∂x = (∂L/∂z) W           which is G of the layer before

from the last layer to the first. The network's outputs and their gradients are [outputs, n], one row per output: what follows (a softmax
over a few choices, say) is then a few operations on long rows, which NumPy does fast.

All parameters are views of one flat vector, and their gradients of another: the norm is one product, Adam a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from inchworm.core.types import Array, Tree
from inchworm.policy.layout import MemoryLayout
from inchworm.policy.spec import PolicySpec


@dataclass(frozen=True)
class Activation:
    """A function f and its derivative f', each written into a given array."""

    apply: Callable[[np.ndarray, np.ndarray], object]
    """(z, y): y = f(z); z and y are one array unless `keeps_input`."""
    derivative: Callable[[np.ndarray, np.ndarray, np.ndarray], object]
    """(z, y, into): into = f'(z), from z or y = f(z), whichever is simpler."""
    keeps_input: bool = False
    """Whether the derivative needs z itself."""


def _tanh_derivative(_: np.ndarray, y: np.ndarray, into: np.ndarray) -> None:
    """1 - tanh²"""
    np.multiply(y, y, out=into)
    np.subtract(1, into, out=into)


def _elu(z: np.ndarray, y: np.ndarray) -> None:
    """z where positive, else exp(z) - 1"""
    low = np.expm1(np.minimum(z, 0))
    np.copyto(y, np.where(z > 0, z, low))


def _sigmoid(z: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-z))
    return result


def _silu_derivative(z: np.ndarray, _: np.ndarray, into: np.ndarray) -> None:
    """(z s)' = s + z s (1 - s) = s (1 + z (1 - s)), with s the sigmoid"""
    s = _sigmoid(z)
    np.multiply(s, 1 + z * (1 - s), out=into)


ACTIVATIONS: dict[str, Activation] = {
    "tanh": Activation(np.tanh, _tanh_derivative),
    "relu": Activation(lambda z, y: np.maximum(z, 0, out=y), lambda _, y, into: np.greater(y, 0, out=into, casting="unsafe")),
    "elu": Activation(_elu, lambda _, y, into: np.copyto(into, np.where(y > 0, 1, y + 1))),  # exp(z) = y + 1 below 0
    "leaky_relu": Activation(
        lambda z, y: np.copyto(y, np.where(z > 0, z, z * z.dtype.type(0.01))),
        lambda _, y, into: np.copyto(into, np.where(y > 0, 1, 0.01), casting="same_kind"),
    ),
    "silu": Activation(lambda z, y: np.multiply(z, _sigmoid(z), out=y), _silu_derivative, keeps_input=True),
}


KEPT_PASSES = 4
"""Batch sizes whose arrays are kept: a run has one or two, and rollouts of many sizes must not accumulate them."""


class Layer:
    """One dense layer: its weights and their gradients."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray, d_weight: np.ndarray, d_bias: np.ndarray) -> None:
        self.weight, self.bias = weight, bias  # [out, in], [out]
        self.d_weight, self.d_bias = d_weight, d_bias


class Hidden:
    """A stack of hidden layers over n samples, with the activations that the backward pass needs."""

    def __init__(self, layers: list[Layer], activation: Activation, rows: int, *, needs_input_gradient: bool) -> None:
        self._layers, self._activation = layers, activation
        self._needs_input_gradient = needs_input_gradient
        dtype = layers[0].weight.dtype if layers else np.dtype(np.float32)
        self._ones = np.ones(rows, dtype)
        self._outputs = [np.empty((rows, len(layer.bias)), dtype) for layer in layers]
        self._inputs = [np.empty_like(y) for y in self._outputs] if activation.keeps_input else self._outputs
        self._gradients = [np.empty_like(y) for y in self._outputs]
        self._back = [np.empty((rows, layer.weight.shape[1]), dtype) for layer in layers]

    def forward(self, x: np.ndarray) -> np.ndarray:
        """[n, in] -> [n, width of the last layer]"""
        self._x = x
        for layer, z, y in zip(self._layers, self._inputs, self._outputs):
            np.dot(x, layer.weight.T, out=z)
            np.add(z, layer.bias, out=z)
            self._activation.apply(z, y)
            x = y
        return x

    def backward(self, gradient: np.ndarray) -> np.ndarray | None:
        """Backpropagate ∂L/∂(last output) [n, width] into the gradients of all layers; return ∂L/∂(first input) if it is needed."""
        for index in range(len(self._layers) - 1, -1, -1):
            layer, into = self._layers[index], self._gradients[index]
            x = self._outputs[index - 1] if index else self._x
            self._activation.derivative(self._inputs[index], self._outputs[index], into)
            np.multiply(into, gradient, out=into)  # ∂L/∂z = G · f'(z)
            np.dot(into.T, x, out=layer.d_weight)  # ∂L/∂W = (∂L/∂z)ᵀ x
            np.dot(self._ones, into, out=layer.d_bias)  # ∂L/∂b: a sum over samples
            if index == 0 and not self._needs_input_gradient:
                return None
            gradient = np.dot(into, layer.weight, out=self._back[index])  # ∂L/∂x = (∂L/∂z) W
        return gradient


class Head:
    """The last layer, without an activation: [n, width] -> [outputs, n]."""

    def __init__(self, layer: Layer, rows: int) -> None:
        self._layer = layer
        self._outputs = np.empty((len(layer.bias), rows), layer.weight.dtype)
        self._back = np.empty((rows, layer.weight.shape[1]), layer.weight.dtype)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """[n, width] -> [outputs, n]"""
        self._x = x
        np.dot(self._layer.weight, x.T, out=self._outputs)
        np.add(self._outputs, self._layer.bias[:, None], out=self._outputs)
        return self._outputs

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        """Backpropagate ∂L/∂outputs [outputs, n] into the layer's gradients; return ∂L/∂x [n, width]."""
        np.dot(gradient, self._x, out=self._layer.d_weight)
        np.sum(gradient, axis=1, out=self._layer.d_bias)
        return np.dot(gradient.T, self._layer.weight, out=self._back)


class Pass:
    """One forward and one backward pass of actor and critic over n samples."""

    def __init__(self, network: FlatNetwork, rows: int) -> None:
        activation = ACTIVATIONS[network.spec.config.activation]
        self._shared = Hidden(network.layers["trunk"], activation, rows, needs_input_gradient=False) if "trunk" in network.layers else None
        needed = self._shared is not None
        self._actor, self._critic = (
            (Hidden(network.layers[name][:-1], activation, rows, needs_input_gradient=needed), Head(network.layers[name][-1], rows))
            for name in ("actor", "critic")
        )

    def forward(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n, F] -> outputs [C + D, n] and normalised values [n]; both are overwritten by the next call."""
        features = inputs if self._shared is None else self._shared.forward(inputs)
        hidden, head = self._actor
        outputs = head.forward(hidden.forward(features))
        hidden, head = self._critic
        return outputs, head.forward(hidden.forward(features))[0]

    def backward(self, d_outputs: np.ndarray, d_values: np.ndarray) -> None:
        """Fill the network's gradient from ∂L/∂outputs [C + D, n] and ∂L/∂values [n]."""
        hidden, head = self._actor
        of_actor = hidden.backward(head.backward(d_outputs))
        hidden, head = self._critic
        of_critic = hidden.backward(head.backward(d_values[None]))
        if self._shared is not None:
            assert of_actor is not None
            assert of_critic is not None
            self._shared.backward(of_actor + of_critic)  # both read the same features, so their gradients add up


class FlatNetwork:
    """A spec's parameters as one flat vector, its gradient as another, and named views of both."""

    def __init__(self, spec: PolicySpec, dtype: np.dtype[np.floating]) -> None:
        self.spec = spec
        self._ends = np.cumsum([int(np.prod(shape)) for shape in spec.layers.values()])
        self.parameters, self.gradient = np.zeros(int(self._ends[-1]), dtype), np.zeros(int(self._ends[-1]), dtype)
        self.weights, self.gradients = self.views(self.parameters), self.views(self.gradient)
        self.layers: dict[str, list[Layer]] = {}
        for name in spec.layers:
            if name.endswith(".weight"):
                bias = name.removesuffix("weight") + "bias"
                arrays = (self.weights[name], self.weights[bias], self.gradients[name], self.gradients[bias])
                self.layers.setdefault(name.split(".")[0], []).append(Layer(*arrays))
        self._passes: dict[int, Pass] = {}

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Copy the parameters from named arrays."""
        for name, view in self.weights.items():
            view[...] = weights[name]

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a vector like `parameters`, by the names of the weights."""
        pieces = np.split(vector, self._ends[:-1])
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self.spec.layers.items(), pieces)}

    def over(self, rows: int) -> Pass:
        """The pass for `rows` samples; its arrays are made once and reused."""
        if rows not in self._passes:
            if len(self._passes) == KEPT_PASSES:
                del self._passes[next(iter(self._passes))]
            self._passes[rows] = Pass(self, rows)
        return self._passes[rows]


# LSTM and GRU in NumPy (step 4 of 9), one row after another.
#
# With x the input of a layer, h its state, σ the logistic function and * the product by elements (torch's equations):
#
#     LSTM   i, f, o = σ(W x + U h + b)    g = tanh(W x + U h + b)          c' = f * c + i * g     h' = o * tanh(c')
#     GRU    r, z = σ(W x + U h + b)       n = tanh(W x + b + r * (U h + d))                       h' = n + z * (h - n)
#
# All gates come from one matrix product with [x, h]. Since σ(v) = ½ + ½ tanh(v / 2), one pass of tanh serves them all: the weights of
# the σ gates are stored halved, which is exact in binary.


class Memory:
    """The recurrent layers of a policy, arranged for acting. It holds only weights; the state belongs to the caller."""

    def __init__(self, layout: MemoryLayout, weights: Mapping[str, np.ndarray]) -> None:
        self.layout = layout
        arrange = _lstm_matrix if layout.kind == "lstm" else _gru_matrix
        parts = ("input.weight", "input.bias", "state.weight", "state.bias")
        self._layers = [arrange(*[weights[f"memory.{layer}.{part}"] for part in parts]) for layer in range(layout.layers)]
        self._dtype = self._layers[0][0].dtype
        self._half = self._dtype.type(0.5)

    def empty(self, num_lanes: int) -> Tree:
        """The initial state, in the weights' dtype."""
        return self.layout.empty(num_lanes, self._dtype)

    def step(self, rows: np.ndarray, state: Tree, episode_starts: Array) -> tuple[np.ndarray, Tree]:
        """Reset where an episode starts, then read [B, in]; return features [B, size] and the new state, in new arrays."""
        try:
            before = [state[name] for name in self.layout.names]
        except (KeyError, TypeError, IndexError):
            raise self.layout.refusal(state, len(rows)) from None
        if before[0].shape != (len(rows), self.layout.layers, self.layout.size):
            raise self.layout.refusal(state, len(rows))
        if np.any(episode_starts):
            before = [np.where(np.asarray(episode_starts)[:, None, None], self._dtype.type(0), part) for part in before]
        after = [np.empty(part.shape, self._dtype) for part in before]
        advance = self._lstm if self.layout.kind == "lstm" else self._gru
        for layer, (matrix, bias) in enumerate(self._layers):
            rows = advance(rows, matrix, bias, [part[:, layer] for part in before], [part[:, layer] for part in after])
        return rows, dict(zip(self.layout.names, after))

    def over(self, rows: np.ndarray, state: Tree, episode_starts: Array) -> np.ndarray:
        """Features [L, N, size] of whole sequences [L, N, in], one row after another."""
        features = np.empty((*rows.shape[:2], self.layout.size), self._dtype)
        for time, (row, starts) in enumerate(zip(rows, episode_starts)):
            features[time], state = self.step(row, state, starts)
        return features

    def _lstm(
        self, rows: np.ndarray, matrix: np.ndarray, bias: np.ndarray, before: list[np.ndarray], after: list[np.ndarray]
    ) -> np.ndarray:
        (hidden, cell), (new_hidden, new_cell), size = before, after, self.layout.size
        gates = np.concatenate((rows, hidden), 1).dot(matrix)  # [B, 4 size]: input, forget, output, cell
        np.add(gates, bias, gates)
        np.tanh(gates, gates)
        opened = gates[:, : 3 * size]
        np.multiply(opened, self._half, opened)
        np.add(opened, self._half, opened)
        np.multiply(gates[:, size : 2 * size], cell, new_cell)
        entering = gates[:, 3 * size :]
        np.multiply(entering, gates[:, :size], entering)
        np.add(new_cell, entering, new_cell)
        np.tanh(new_cell, new_hidden)
        np.multiply(new_hidden, gates[:, 2 * size : 3 * size], new_hidden)
        return new_hidden

    def _gru(self, rows: np.ndarray, matrix: np.ndarray, bias: np.ndarray, before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
        (hidden,), (new_hidden,), size = before, after, self.layout.size
        gates = np.concatenate((rows, hidden), 1).dot(matrix)  # [B, 4 size]: reset, update, new of the input, new of the memory
        np.add(gates, bias, gates)
        opened = gates[:, : 2 * size]
        np.tanh(opened, opened)
        np.multiply(opened, self._half, opened)
        np.add(opened, self._half, opened)
        new, recalled = gates[:, 2 * size : 3 * size], gates[:, 3 * size :]
        np.multiply(recalled, gates[:, :size], recalled)
        np.add(new, recalled, new)
        np.tanh(new, new)
        np.subtract(hidden, new, new_hidden)
        np.multiply(new_hidden, gates[:, size : 2 * size], new_hidden)
        np.add(new_hidden, new, new_hidden)
        return new_hidden


def _lstm_matrix(w: np.ndarray, b: np.ndarray, u: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[in + size, 4 size] and [4 size]: input, forget and output gate halved, then the cell."""
    both, bias = np.concatenate([w, u], 1), b + d  # [4 size, in + size]
    into, forget, cell, out = range(4)
    blocks, biases = np.split(both, 4), np.split(bias, 4)
    half = both.dtype.type(0.5)
    matrix = np.concatenate([*(blocks[gate] * half for gate in (into, forget, out)), blocks[cell]])
    return np.ascontiguousarray(matrix.T), np.concatenate([*(biases[gate] * half for gate in (into, forget, out)), biases[cell]])


def _gru_matrix(w: np.ndarray, b: np.ndarray, u: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[in + size, 4 size] and [4 size]: reset and update gate halved, then the new memory's part from the input and from the memory."""
    size, half = len(u) // 3, u.dtype.type(0.5)
    opened = np.concatenate([w[: 2 * size], u[: 2 * size]], 1) * half
    of_input = np.concatenate([w[2 * size :], np.zeros_like(u[2 * size :])], 1)
    of_memory = np.concatenate([np.zeros_like(w[2 * size :]), u[2 * size :]], 1)
    bias = np.concatenate([(b + d)[: 2 * size] * half, b[2 * size :], d[2 * size :]])
    return np.ascontiguousarray(np.concatenate([opened, of_input, of_memory]).T), bias
