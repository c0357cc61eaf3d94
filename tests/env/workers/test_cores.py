"""Tests of env/workers/cores.py: quotas of both versions of control groups, in files made here."""

import os

import pytest

from inchworm.env.workers import auto as cores
from inchworm.env.workers.auto import cpu_quota, usable_cores


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n", "cpu.max": "200000 100000"}, 0.5),
    ],
)
def test_quota(tmp_path, files, quota):
    assert cpu_quota(put(tmp_path, files)) == quota


def test_affinity_and_quota_bound_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CGROUPS", put(tmp_path, {"cpu.max": "250000 100000"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert usable_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert usable_cores() == 1
    monkeypatch.setattr(cores, "_CGROUPS", put(tmp_path, {"cpu.max": "10000 100000"}))
    assert usable_cores() == 1


def test_systems_without_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
