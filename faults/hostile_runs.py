"""Crafted configs, run directories, states and replays for B1, opened by the commands as users would."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from doubles.replays import PWNED, hostile_replay, long_replay, small_replay
from faults.hostile_cases import Case, Sandbox, at, become
from faults.hostile_tools import newest_checkpoint, payloads

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
    """Configs that are code, bombs or nonsense."""
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
        yield Case(f"config: {name}", "config", lambda box, text=text: box.put("x.yaml", text.encode("utf-8", "surrogateescape")))
        yield Case(f"inchworm config: {name}", "command", lambda box, text=text: _command("config", box, text))
    for id in ("evil:make", "os:system", "evil:canary", "builtins:exec", "evil:CartPole-v1", "evil.sub:make", ":", "a:b:c"):
        yield Case(f"run config: env.id {id}", "run config", lambda box, id=id: box.put("x.yaml", yaml.safe_dump({"env": {"id": id}})))
        yield Case(
            f"inchworm train: env.id {id}", "command", lambda box, id=id: _command("train", box, yaml.safe_dump({"env": {"id": id}}))
        )
    for what in ("fifo", "/dev/zero", "directory"):
        yield Case(f"config is {what}", "config", lambda box, what=what: f"{become(box.inside, 'x.yaml', what)}/x.yaml")


def _command(name: str, box: Sandbox, text: str = "") -> list[str]:
    """A command in a directory with modules that hope to be imported."""
    code = f"open({str(box.canary)!r}, 'w').close()\n"
    for module in ("evil", "os", "yaml", "numpy", "gymnasium", "rich", "canary"):
        box.put(f"{module}.py", code)
    if text:
        box.put("x.yaml", text.encode("utf-8", "surrogateescape"))
    return COMMANDS[name]


def command_cases() -> Iterator[Case]:
    """Run directories from elsewhere."""
    for wrapper in ("os.system", "evil.Wrapper", "vector", "__builtins__", "__class__", "../canary", "RecordVideo", "TransformReward"):
        config = {"env": {"wrappers": [{"name": wrapper, "kwargs": {"func": "evil:make", "video_folder": "/tmp/canary-videos"}}]}, **SHORT}
        yield Case(
            f"inchworm train: wrapper {wrapper}", "command", lambda box, config=config: _command("train", box, yaml.safe_dump(config))
        )
    for kwargs in (
        {"__class__": "os.system"},
        {"render_mode": "evil"},
        {"entry_point": "evil:make"},
        {"id": "evil:make"},
        {"disable_env_checker": 3},
    ):
        config = {"env": {"kwargs": kwargs, "num_workers": 0}, **SHORT}
        yield Case(
            f"inchworm train: env.kwargs {kwargs}",
            "command",
            lambda box, config=config: _command("train", box, yaml.safe_dump(config)),
            True,
        )
    for command, files in {
        "resume": ("config.yaml", "versions.json", "metrics.jsonl", "timing.jsonl", "lock", "checkpoints"),
        "evaluate": ("config.yaml", "policy.safetensors"),
        "learn": ("config.yaml", "lock", "metrics.jsonl"),
        "collect": ("config.yaml", "policy.safetensors"),
    }.items():
        for file in files:
            for what in ("fifo", "/dev/zero", "directory", "victim"):

                def make(box: Sandbox, command: str = command, file: str = file, what: str = what) -> list[str]:
                    return _spoiled(box, command, file, what)

                # Links inside one's own run may be followed for reading; what must not happen is that anything is written through them.
                yield Case(f"inchworm {command}: {file} is {what}", "command", make, may_load=True)
    rows = {
        "deep": "[" * 100_000,
        "deep in a row": '{"a":' + "[" * 50_000 + "]" * 50_000 + "}",
        "text for a number": '{"iteration": "x"}',
        "null": '{"iteration": null}',
        "infinite": '{"iteration": 1e999}',
        "a list": '{"iteration": []}',
        "binary": "\udcff\udcfe",
        "no object": "3",
        "NaN": '{"iteration": NaN}',
        "long": '{"a": ' + "9" * 9_999 + "}",
    }
    for file in ("metrics.jsonl", "timing.jsonl", "versions.json"):
        for name, text in rows.items():
            yield Case(f"inchworm resume: {file} {name}", "command", lambda b, f=file, t=text: _rows(b, f, t), may_load=True)
    for name in payloads(Path("x")):
        yield Case(
            f"inchworm evaluate: policy is {name}",
            "command",
            lambda box, name=name: _payload(box, "evaluate", "runs/good/policy.safetensors", name),
        )
        yield Case(
            f"inchworm learn: rollout is {name}", "command", lambda box, name=name: _payload(box, "learn", "rollout.safetensors", name)
        )


def _in_run(box: Sandbox, command: str) -> Path:
    run = box.run()
    box.put("rollout.safetensors", (box.genuine / "rollout.safetensors").read_bytes())
    _command(command, box)
    return run


def _spoiled(box: Sandbox, command: str, file: str, what: str) -> list[str]:
    run = _in_run(box, command)
    if (run / file).is_dir():
        (run / file).rename(box.inside / "moved")
    become(
        run, file, str(box.victim) if what == "victim" and file != "checkpoints" else str(box.victim.parent) if what == "victim" else what
    )
    return COMMANDS[command]


def _rows(box: Sandbox, file: str, text: str) -> list[str]:
    run = _in_run(box, "resume")
    (run / file).write_bytes(text.encode("utf-8", "surrogateescape") + b"\n" + (run / file).read_bytes())
    return COMMANDS["resume"]


def _payload(box: Sandbox, command: str, file: str, name: str) -> list[str]:
    _in_run(box, command)
    (box.inside / file).write_bytes(payloads(box.canary)[name])
    return COMMANDS[command]


def state_cases(genuine: Path) -> Iterator[Case]:
    """Every part of a checkpoint's state removed, or replaced by something else, under right checksums, and then resumed from."""
    from inchworm.run.checkpoint import TrainingCheckpointer

    state = TrainingCheckpointer(newest_checkpoint(genuine / "runs/good").parent).load().state
    others = (("text", "os.system"), ("a list", []), ("-1", -1), ("10^30", 10**30), ("null", None))
    for number, path in enumerate(_paths(state)):
        for words, value in (("removed", ...), others[number % len(others)]):
            yield Case(f"inchworm resume: state {path} {words}", "command", lambda b, p=path, v=value: _with_state(b, p, v), may_load=True)


def _paths(data: Any, prefix: str = "") -> Iterator[str]:
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in items:
        if "." not in str(key):
            yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _with_state(box: Sandbox, path: str, value: Any) -> list[str]:
    from inchworm.run.checkpoint import TrainingCheckpointer

    run = _in_run(box, "resume")
    newest = newest_checkpoint(run)
    known = TrainingCheckpointer(newest.parent)
    loaded = known.load()
    changed: Callable[..., Any] = at
    known.save(loaded.step + 1, changed(copy.deepcopy(loaded.state), path, value))
    for old in newest.parent.iterdir():
        if old.name <= newest.name:  # nothing good to fall back to
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
    """Each opened by the loader, whose result becomes a page, and many by the command."""
    contents: dict[str, bytes] = {name: text.encode("utf-8", "surrogateescape") for name, text in TEXTS.items()}
    contents |= {name: json.dumps(at(small_replay(), *change)).encode() for name, change in CHANGES.items()}
    for name, content in contents.items():
        yield Case(f"replay: {name}", "replay", lambda box, content=content: box.put("x.json", content))
        yield Case(f"inchworm replay: {name}", "command", lambda box, content=content: _replay_command(box, content))
    for name in payloads(Path("x")):
        yield Case(f"{name} as a replay", "replay", lambda box, name=name: box.put("x.json", payloads(box.canary)[name]))
        yield Case(f"inchworm replay: {name}", "command", lambda box, name=name: _replay_command(box, payloads(box.canary)[name]))
    for what in ("fifo", "/dev/zero", "directory"):
        yield Case(f"replay is {what}", "replay", lambda box, what=what: f"{become(box.inside, 'x.json', what)}/x.json")
    yield from _pages()


def _pages() -> Iterator[Case]:
    """Replays that are in order, in places that are not; and texts that a page must not obey."""
    whole = json.dumps(small_replay()).encode()
    yield Case(
        "inchworm replay: markup everywhere", "command", lambda box: _replay_command(box, json.dumps(hostile_replay()).encode()), True
    )
    yield Case("replay: as long as may be", "replay", lambda box: box.put("x.json", json.dumps(long_replay(3_400, 10))), True)
    climbing = at(at(small_replay(), "world.game", "../../victim"), "meta.players", ["/etc/passwd", PWNED])
    yield Case("inchworm replay: names that climb", "command", lambda box: _replay_command(box, json.dumps(climbing).encode()), True)
    for what in ("fifo", "/dev/zero", "directory", "victim"):
        yield Case(f"inchworm replay: the page is {what}", "command", lambda box, what=what: _in_the_way(box, whole, what))
        yield Case(
            f"inchworm replay: --out is {what}", "command", lambda box, what=what: [*_in_the_way(box, whole, what), "--out", "x.html"], True
        )


def _replay_command(box: Sandbox, content: bytes) -> list[str]:
    box.put("x.json", content)
    return ["replay", "x.json", "--no-open"]


def _in_the_way(box: Sandbox, content: bytes, what: str) -> list[str]:
    """The command, with something else where its page would go."""
    become(box.inside, "x.html", str(box.victim) if what == "victim" else what)
    return _replay_command(box, content)
