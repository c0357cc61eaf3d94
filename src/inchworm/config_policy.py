"""The knobs of a network. Serves `config`."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from inchworm.config_base import MOST_COPIES, STRICT, ConfigBase, check_positive, check_range, in_words
from inchworm.errors import ConfigError

Activation = Literal["tanh", "relu", "elu", "leaky_relu", "silu"]


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyConfig(ConfigBase):
    """The network and its normalisers."""

    kind: Literal["mlp", "cnn", "lstm", "gru"] = "mlp"
    """mlp flattens every observation; cnn sends images through convolutions first; lstm and gru remember, and convolve images, too."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, of actor and critic alike."""
    activation: Activation = "tanh"
    """Between the layers."""
    shared_trunk: bool = False
    """One trunk for actor and critic instead of one each."""
    orthogonal_init: bool = True
    """Orthogonal weights with gains sqrt 2 (hidden), 0.01 (actions), 1 (value); else uniform by fan-in."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """How a Gaussian action is brought into a Box: clipped on its way to the environment, or squashed."""
    normalize_observations: bool = False
    """Scale continuous observations by running mean and standard deviation, inside the policy."""
    normalize_values: bool = False
    """Let the value head predict normalised returns (PopArt)."""
    observation_clip: float = 10.0
    """Bound of normalised observations."""
    cnn_filters: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    """Convolutions as (channels, kernel, stride)."""
    cnn_features: int = 512
    """Width of the layer after the convolutions."""
    memory_size: int = 64
    """Width of the memory of lstm and gru; actor and critic read the same one, so turn normalize_values on where returns are large."""
    memory_layers: int = 1
    """Recurrent layers, one above the other."""
    memory_place: Literal["before", "after"] = "after"
    """Where the memory stands: after the hidden layers, which actor and critic then share, or before them."""
    central_critic: bool = False
    """Let the critic also read the world's global state, which no actor sees; what follows an agent's death is then credited to it."""

    def __post_init__(self) -> None:
        check_range(self, "memory_size", 1, MOST_COPIES)
        check_range(self, "memory_layers", 1, 100)
        for index, size in enumerate(self.hidden_sizes):
            if not 1 <= size <= MOST_COPIES:
                raise ConfigError(f"policy.hidden_sizes[{index}]={size!r:.80} must be from 1 to {MOST_COPIES}")
        for index, layer in enumerate(self.cnn_filters):
            if min(layer) < 1 or max(layer) > 10_000:
                raise ConfigError(f"policy.cnn_filters[{index}]={layer!r:.80} must be (channels, kernel, stride), each from 1 to 10000")
        check_range(self, "cnn_features", 1, MOST_COPIES)
        check_positive(self, "observation_clip")
        check_range(self, "log_std_init", -20.0, 5.0)
