"""Crafted configs, run directories, states and replays for B1, opened by the commands as a user would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from doubles.replays import PWNED, hostile_replay, long_replay, small_replay
from faults.hostile_cases import Case, Sandbox, put_payload, replace_file, set_at
from faults.hostile_tools import newest_checkpoint, payloads
from inchworm.run.checkpoint import TrainingCheckpointer

COMMANDS: dict[str, list[str]] = {
    "resume": ["resume", "runs/good", "--total-timesteps", "64", "--quiet"],
    "evaluate": ["evaluate", "runs/good", "--episodes", "2", "--quiet"],
    "learn": ["learn", "runs/good", "rollout.safetensors", "--quiet"],
    "collect": ["collect", "runs/good", "--out", "new.safetensors", "--quiet"],
    "train": ["train", "--config", "x.yaml", "--quiet"],
    "config": ["config", "--config", "x.yaml"],
}
SHORT = {
    "run": {"total_timesteps": 8, "backend": "numpy"},
    "ppo": {"rollout_steps": 8, "num_minibatches": 1},
    "evaluation": {"final_episodes": 0},
}


def yaml_cases() -> Iterator[Case]:
    """Configs that contain code, expand without bound or are invalid."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi"))
    texts = {
        "calls": "!!python/object/apply:os.system ['touch canary']",
        "makes": "!!python/object/new:os.system ['touch canary']",
        "names": "env: !!python/name:os.system",
        "imports": "env: !!python/module:evil",
        "objects": "!!python/object:evil.Canary {}",
        "tuples": "env: !!python/tuple [1]",
        "own tags": "env: !canary {a: 1}",
        "aliases in aliases": bomb,
        "an alias of itself": "a: &a [*a]",
        "merges": "env: {<<: {id: x}, <<: [1]}",
        "deep": "env: " + "[" * 20_000,
        "deep maps": "a: " + "{a: " * 10_000,
        "wide": "a: [" + "1," * 60_000 + "]",
        "20,000 keys": "env: {" + ", ".join(f"k{n}: 1" for n in range(12_000)) + "}",
        "one key 20,000 times": "env: {" + "id: x, " * 15_000 + "}",
        "40 MB": "#" * 40_000_000,
        "a number of 10,000 digits": "run: {seed: " + "9" * 10_000 + "}",
        "a number of 100,000 sixtieths": "run: {seed: 1" + ":59" * 30_000 + "}",
        "an int of nothing": 'run: {seed: !!int ""}',
        "a float of nothing": 'run: {seed: !!float ""}',
        "a character beyond Unicode": 'run: {name: "\\UFFFFFFFF"}',
        "bytes": "run: {name: !!binary aGk=}",
        "a date": "run: {name: 2001-01-01}",
        "a date that is none": "run: {name: 2001-99-99}",
        "a set": "env: !!set {a}",
        "lists as keys": "? [a]\n: 1",
        "doubled keys": "env: {id: a, id: b}",
        "two documents": "a: 1\n---\nb: 2",
        "infinity": "ppo: {gamma: .inf}",
        "NaN": "ppo: {gamma: .nan}",
        "a name that climbs": "run: {name: ../../canary}",
        "an absolute name": "run: {name: /tmp/canary}",
        "a name with NUL": 'run: {name: "a\\0b"}',
        "a directory with NUL": 'run: {directory: "a\\0b"}',
        "a lone surrogate": 'run: {directory: "\\ud800"}',
        "sizes of 10^30": "env: {num_envs: 1e30}",
        "text for a section": "env: os.system",
        "unknown sections": "__class__: os.system",
        "a list": "[1]",
        "nothing": "",
        "not UTF-8": "run: {name: \udcff}",
        "NUL": "a: \0",
        "UTF-16": "\udcff\udcfea\0",
    }
    for name, text in texts.items():
        yield Case(f"config: {name}", "config", Sandbox.put, ("x.yaml", text))
        yield Case(f"inchworm config: {name}", "command", _command, ("config", text))
    for id in ("evil:make", "os:system", "evil:canary", "builtins:exec", "evil:CartPole-v1", "evil.sub:make", ":", "a:b:c"):
        text = yaml.safe_dump({"env": {"id": id}})
        yield Case(f"run config: env.id {id}", "run config", Sandbox.put, ("x.yaml", text))
        yield Case(f"inchworm train: env.id {id}", "command", _command, ("train", text))
    for what in ("fifo", "/dev/zero", "directory"):
        yield Case(f"config is {what}", "config", _replaced, ("x.yaml", what))


def _replaced(box: Sandbox, name: str, what: str) -> str:
    return replace_file(box.inside / name, what)


def _command(box: Sandbox, name: str, text: str = "") -> list[str]:
    """A command in a directory with modules that must not be imported."""
    for module in ("evil", "os", "yaml", "numpy", "gymnasium", "rich", "canary"):
        box.put(f"{module}.py", f"open({str(box.canary)!r}, 'w').close()\n")
    if text:
        box.put("x.yaml", text)
    return COMMANDS[name]


def command_cases() -> Iterator[Case]:
    """Run directories from an untrusted source."""
    for wrapper in ("os.system", "evil.Wrapper", "vector", "__builtins__", "__class__", "../canary", "RecordVideo", "TransformReward"):
        config = {"env": {"wrappers": [{"name": wrapper, "kwargs": {"func": "evil:make", "video_folder": "/tmp/canary-videos"}}]}, **SHORT}
        yield Case(f"inchworm train: wrapper {wrapper}", "command", _command, ("train", yaml.safe_dump(config)))
    options = {"__class__": "os.system", "render_mode": "evil", "entry_point": "evil:make", "id": "evil:make", "disable_env_checker": 3}
    for option, value in options.items():
        text = yaml.safe_dump({"env": {"kwargs": {option: value}, "num_workers": 0}, **SHORT})
        yield Case(f"inchworm train: env.kwargs {option}={value}", "command", _command, ("train", text), may_load=True)
    for command, files in {
        "resume": ("config.yaml", "versions.json", "metrics.jsonl", "timing.jsonl", "lock", "checkpoints"),
        "evaluate": ("config.yaml", "policy.safetensors"),
        "learn": ("config.yaml", "lock", "metrics.jsonl"),
        "collect": ("config.yaml", "policy.safetensors"),
    }.items():
        for file in files:
            for what in ("fifo", "/dev/zero", "directory", "victim"):
                # Links inside a run may be followed for reading, but nothing may be written through them.
                yield Case(f"inchworm {command}: {file} is {what}", "command", _without_file, (command, file, what), may_load=True)
    rows = {
        "deep": "[" * 100_000,
        "deep in a row": '{"a":' + "[" * 50_000 + "]" * 50_000 + "}",
        "text for a number": '{"iteration": "x"}',
        "null": '{"iteration": null}',
        "infinite": '{"iteration": 1e999}',
        "a list": '{"iteration": []}',
        "binary": "\udcff\udcfe",
        "not an object": "3",
        "NaN": '{"iteration": NaN}',
        "long": '{"a": ' + "9" * 9_999 + "}",
    }
    for file in ("metrics.jsonl", "timing.jsonl", "versions.json"):
        for name, text in rows.items():
            yield Case(f"inchworm resume: {file} {name}", "command", _with_first_row, (file, text), may_load=True)
    for name in payloads(Path("x")):
        yield Case(f"inchworm evaluate: policy is {name}", "command", _payload, ("evaluate", "runs/good/policy.safetensors", name))
        yield Case(f"inchworm learn: rollout is {name}", "command", _payload, ("learn", "rollout.safetensors", name))


def _copied_run(box: Sandbox) -> Path:
    """A copy of the genuine run and its rollout, for a command."""
    _command(box, "resume")
    box.put("rollout.safetensors", (box.genuine / "rollout.safetensors").read_bytes())
    return box.run()


def _without_file(box: Sandbox, command: str, file: str, what: str) -> list[str]:
    path = _copied_run(box) / file
    if path.is_dir():
        path.rename(box.inside / "moved")
    victim = box.victim.parent if file == "checkpoints" else box.victim
    replace_file(path, str(victim) if what == "victim" else what)
    return COMMANDS[command]


def _with_first_row(box: Sandbox, file: str, text: str) -> list[str]:
    path = _copied_run(box) / file
    path.write_bytes(text.encode("utf-8", "surrogateescape") + b"\n" + path.read_bytes())
    return COMMANDS["resume"]


def _payload(box: Sandbox, command: str, file: str, name: str) -> list[str]:
    _copied_run(box)
    put_payload(box, file, name)
    return COMMANDS[command]


def state_cases(genuine: Path) -> Iterator[Case]:
    """Every part of a checkpoint's state removed or replaced, with valid checksums; the run is then resumed."""
    state = TrainingCheckpointer(newest_checkpoint(genuine / "runs/good").parent).load().state
    others = (("text", "os.system"), ("a list", []), ("-1", -1), ("10^30", 10**30), ("null", None))
    for number, path in enumerate(_paths(state)):
        for words, value in (("removed", ...), others[number % len(others)]):
            yield Case(f"inchworm resume: state {path} {words}", "command", _with_state, (path, value), may_load=True)


def _paths(data: Any, prefix: str = "") -> Iterator[str]:
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in items:
        if "." not in str(key):
            yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _with_state(box: Sandbox, path: str, value: Any) -> list[str]:
    newest = newest_checkpoint(_copied_run(box))
    checkpointer = TrainingCheckpointer(newest.parent)
    loaded = checkpointer.load()
    checkpointer.save(loaded.step + 1, set_at(loaded.state, path, value))
    for old in newest.parent.iterdir():
        if old.name <= newest.name:  # no valid checkpoint to fall back to
            old.rename(box.inside / old.name)
    return COMMANDS["resume"]


CHANGES: dict[str, tuple[str, Any]] = {
    "another format": ("format", "os.system"),
    "version 2": ("version", 2),
    "version true": ("version", True),
    "version 1.0": ("version", 1.0),
    "no world": ("world", ...),
    "world as text": ("world", "os.system"),
    "classes in the world": ("world.__class__", "os.system"),
    "a width of 10^308": ("world.width", 1e308),
    "a height of 0": ("world.height", 0),
    "10^6 walls": ("world.walls", [[0, 0, 1, 1]] * 100_000),
    "walls as text": ("world.walls", "1234"),
    "a zone of null": ("world.zone", None),
    "100,000 units": ("world.units", [small_replay()["world"]["units"][0]] * 50_000),
    "no units": ("world.units", []),
    "team -1": ("world.units.0.team", -1),
    "team __proto__": ("world.units.0.team", "__proto__"),
    "a kind of 10 MB": ("world.units.0.kind", "x" * 10_000_000),
    "a kind that is half a character": ("world.units.0.kind", "\ud800"),
    "10^30 steps": ("world.max_steps", 10**30),
    "steps of no time": ("world.step_seconds", 0),
    "frames as a mapping": ("frames", {"0": {}}),
    "no frames": ("frames", []),
    "a frame of null": ("frames.1", None),
    "a unit at 10^308": ("frames.1.units.0.0", 1e308),
    "a unit at text": ("frames.1.units.0.0", "</script>"),
    "a unit at a list": ("frames.1.units.0.0", [[]]),
    "negative health": ("frames.1.units.0.3", -1),
    "a shot by unit 10^9": ("frames.1.shots.0.0", 10**9),
    "a shot by unit -1": ("frames.1.shots.0.0", -1),
    "a shot by a constructor": ("frames.1.shots.0.0", "constructor"),
    "100,000 shots": ("frames.1.shots", [[0, 1, 1]] * 100_000),
    "meta 1,000 deep": ("meta.deep", json.loads("[" * 900 + "]" * 900)),
    "meta of 10^30": ("meta.seed", 10**30),
    "players as a mapping": ("meta.players", {"0": "a", "length": 2}),
    "a result of text": ("result", "won"),
    "an unknown winner": ("result.winner", 7),
    "an unknown reason": ("result.reason", "__proto__"),
}
TEXTS = {
    "nothing": "",
    "null": "null",
    "deep": "[" * 100_000,
    "deep maps": '{"a":' * 50_000,
    "wide": "[" + "[]," * 5_000_000 + "[]]",
    "wide maps": '{"format":"inchworm-replay","x":[' + "{}," * 240_000 + "{}]}",
    "doubled": '{"format":"inchworm-replay","format":"inchworm-replay"}',
    "NaN": '{"format":NaN}',
    "1e999": json.dumps(small_replay()).replace("20.0", "1e999"),
    "10,000 digits": '{"format":' + "9" * 10_000 + "}",
    "cut off": json.dumps(small_replay())[:-100],
    "40 MB of blanks": " " * 40_000_000,
    "15 MB of one text": '{"format":"' + "x" * 15_000_000 + '"}',
    "not UTF-8": '{"format":"\udcff"}',
    "UTF-16": "\udcff\udcfe{\0}\0",
    "code": "__import__('os').system('touch canary')",
}


def replay_cases() -> Iterator[Case]:
    """Each opened by the loader, whose result becomes a page, and by the command."""
    contents = {**TEXTS, **{name: json.dumps(set_at(small_replay(), *change)) for name, change in CHANGES.items()}}
    for name, content in contents.items():
        yield Case(f"replay: {name}", "replay", Sandbox.put, ("x.json", content))
        yield Case(f"inchworm replay: {name}", "command", _replay_command, (content,))
    for name in payloads(Path("x")):
        yield Case(f"{name} as a replay", "replay", put_payload, ("x.json", name))
        yield Case(f"inchworm replay: {name}", "command", _replay_payload, (name,))
    for what in ("fifo", "/dev/zero", "directory"):
        yield Case(f"replay is {what}", "replay", _replaced, ("x.json", what))
    # Valid replays with text that a page must not interpret, and pages whose place is taken.
    markup = json.dumps(hostile_replay())
    yield Case("inchworm replay: markup everywhere", "command", _replay_command, (markup,), may_load=True)
    yield Case("replay: the longest allowed", "replay", Sandbox.put, ("x.json", json.dumps(long_replay(3_400, 10))), may_load=True)
    climbing = json.dumps(set_at(set_at(small_replay(), "world.game", "../../victim"), "meta.players", ["/etc/passwd", PWNED]))
    yield Case("inchworm replay: names that climb", "command", _replay_command, (climbing,), may_load=True)
    for what in ("fifo", "/dev/zero", "directory", "victim"):
        yield Case(f"inchworm replay: the page is {what}", "command", _without_page, (what,))
        yield Case(f"inchworm replay: --out is {what}", "command", _without_page, (what, "--out", "x.html"), may_load=True)


def _replay_command(box: Sandbox, content: bytes | str) -> list[str]:
    box.put("x.json", content)
    return ["replay", "x.json", "--no-open"]


def _replay_payload(box: Sandbox, name: str) -> list[str]:
    return _replay_command(box, payloads(box.canary)[name])


def _without_page(box: Sandbox, what: str, *options: str) -> list[str]:
    replace_file(box.inside / "x.html", str(box.victim) if what == "victim" else what)
    return [*_replay_command(box, json.dumps(small_replay())), *options]
