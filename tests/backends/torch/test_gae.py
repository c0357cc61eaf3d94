"""What torch's GAE adds to the recursion, which the conformance suite tests: arrays on other devices."""

import torch

from inchworm.backends.torch import gae


def test_where_numpy_cannot_see_the_memory_the_recursion_runs_with_tensors(monkeypatch):
    given = [torch.zeros((3, 2), device="meta") for _ in range(5)]
    assert gae.compute_gae(*given[:3], given[3].bool(), given[4].bool(), 0.9, 0.8).device.type == "meta"
    monkeypatch.setattr(gae, "gae_on_device", lambda *arguments: arguments)
    assert all(one is other for one, other in zip(gae.compute_gae(*given, 0.9, 0.8), (*given, 0.9, 0.8), strict=True))
