"""What a user's program may write with strict types: checked by mypy (`make lint`), never run. An ignored error must be one."""

import numpy as np

import inchworm
from examples.custom_network import OwnPolicy, ResidualNetwork
from inchworm import LoadedPolicy, NumpyPolicy, OpponentConfig, PolicyConfig, TorchPolicy, evaluate_policy

policy = inchworm.load_policy("runs/first")
action, memory = policy.predict(np.zeros(4, np.float32)), policy.predict_with_memory(np.zeros(4, np.float32))[1]
score: float = evaluate_policy(policy, "CartPole-v1").mean_return
own: OwnPolicy = inchworm.load_policy("x", policy=OwnPolicy(4, 2))
made: OwnPolicy = inchworm.load_policy("x", policy=lambda: OwnPolicy(4, 2))
network: LoadedPolicy = inchworm.load_policy("x", network=ResidualNetwork)
lists = PolicyConfig(hidden_sizes=[32, 32], cnn_filters=[[8, 4, 2]]), OpponentConfig(anchors=["random"])  # where the field is a tuple


def built_in(one: NumpyPolicy, other: TorchPolicy) -> list[LoadedPolicy]:
    return [one, other]


inchworm.load_policy("x").no_such_method()  # type: ignore[attr-defined]
