"""Tests of the documentation: Python blocks run, commands parse, links resolve, generated pages are up to date."""

import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

import gymnasium as gym
import pytest
import yaml

import inchworm
from doubles.trackers import Recorder
from inchworm import (
    ConvergenceConfig,
    CurriculumConfig,
    EnvConfig,
    EvalConfig,
    Loss,
    OpponentConfig,
    PolicyConfig,
    PolicyMap,
    PPOConfig,
    PPOTrainer,
    RunConfig,
    TrainingConfig,
)
from inchworm.analysis.search_space import check_space
from inchworm.cli.main import COMMANDS, main
from inchworm.core.errors import ConfigError
from inchworm.evaluate.suites import read_suites
from inchworm.worlds.toys import DEATHS, comings

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return (line number, text) of every fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_CONSOLE = [page for page in PAGES if blocks(page, "console")]


def test_pages_were_found() -> None:
    names = {name(page) for page in WITH_PYTHON}
    pages = ("index", "quickstart", "environments", "policies", "custom_losses", "runs", "metrics", "troubleshooting", "migration")
    assert {"README.md", *(f"docs/{page}.md" for page in pages)} <= names
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"} <= {name(page) for page in PAGES}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in order, in one namespace and an empty directory; tracebacks show the line of the page."""
    import torch

    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    namespace: dict[str, object] = {"__name__": "__docs__"}
    try:
        for line, code in blocks(page, "python"):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runs `first` and `team` that the pages mention, trained for a few steps, and a rollout of the first."""
    directory = tmp_path_factory.mktemp("console")
    tiny = "--run.total-timesteps 64 --ppo.rollout-steps 16 --ppo.minibatch-size 16 --env.num-envs 2 --evaluation.final-episodes 2"
    with contextlib.chdir(directory):
        assert main(["train", "CartPole-v1", "--run.name", "first", *tiny.split(), "--quiet"]) == 0
        assert main(["train", "Skirmish-v0", "--run.name", "team", *tiny.replace(" 64 ", " 192 ").split(), "--quiet"]) == 0
        assert main(["collect", "first", "--out", "rollout.safetensors", "--quiet"]) == 0
    return directory


def commands(page: Path) -> list[str]:
    lines = [line for _, text in blocks(page, "console") for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def output_of(arguments: list[str]) -> str:
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        code = main(arguments)
    assert code == 0 or (arguments[0], code) == ("diff", 1), f"inchworm {' '.join(arguments)} ended with {code}"
    return captured.getvalue()


def try_command(line: str) -> None:
    """Run a command if that is cheap, else check that its arguments parse."""
    words, _, target = (part.strip() for part in line.partition(" > "))
    command, *arguments = shlex.split(words, comments=True)[1:]
    assert command in COMMANDS, line
    if command == "train":  # `config` reads the same flags and stops before training
        output_of(["config", *arguments])
    elif command in ("resume", "watch", "compare", "sweep"):  # which would train, or serve until Ctrl-C
        page = output_of([command, "--help"])
        assert all(flag in page for flag in arguments if flag.startswith("--")), line
    else:
        output = output_of([command, *arguments])
        if target:
            Path(target).write_text(output, encoding="utf-8")


@pytest.mark.parametrize("page", WITH_CONSOLE, ids=name)
def test_commands_parse(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for line in commands(page):
        if line.startswith("make "):
            assert line.split()[1] in MAKE_TARGETS, line
        elif line.startswith("inchworm "):
            try_command(line)
        elif line.startswith("torchrun "):
            try_command(f"inchworm {line.partition(' -m inchworm ')[2]}")


def read_yaml_blocks(page: Path) -> None:
    """Read the YAML blocks of a page as the library does: a suite, several policies, a sweep's space, the job of a Ray cluster."""
    for _, text in blocks(page, "yaml"):
        data = yaml.safe_load(text)
        if page.stem == "evaluation":
            read_suites(data)
        elif page.stem == "sweeps":
            check_space(TrainingConfig(), data, 1)
        elif page.stem == "distributed":
            try_command(data["spec"]["entrypoint"])
        else:
            TrainingConfig.from_dict(data)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_yaml_blocks_are_read(page: Path) -> None:
    read_yaml_blocks(page)


def test_a_wrong_name_in_a_yaml_block_is_detected(tmp_path: Path) -> None:
    for stem, text in (
        ("evaluation", "combat: [{env: Skirmish-v0, games: 20}]"),
        ("sweeps", "ppo.rate: 1e-4..1e-2"),
        ("several_policies", "policies: {guard: {agent: agent_1}}"),
    ):
        page = tmp_path / f"{stem}.md"
        page.write_text(f"```yaml\n{text}\n```\n", encoding="utf-8")
        with pytest.raises(ConfigError):
            read_yaml_blocks(page)


def test_a_wrong_flag_in_a_page_is_detected(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for line in ("inchworm train CartPole-v1 --ppo.clip-range 0.1", "inchworm resume first --steps 5", "inchworm fly CartPole-v1"):
        with pytest.raises(AssertionError):
            try_command(line)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The titles of a page as links name them, or the classes and functions of a source file."""
    if page.suffix == ".py":
        return set(site("make_site").definitions(page.relative_to(ROOT).as_posix()))
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@cache
def site(script: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_page_is_up_to_date() -> None:
    module = site("make_config_table")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "docs/config.md is out of date; type: make docs"


@pytest.mark.filterwarnings("ignore:'myst_parser:PendingDeprecationWarning")
def test_the_site_reads_every_page_and_every_public_name_without_a_warning(tmp_path: Path) -> None:
    """All of a build but the writing of pages: links between pages, the API's docstrings, the navigation."""
    make_site = site("make_site")
    assert make_site.build(tmp_path, "dummy") == 0
    texts = {
        page.relative_to(tmp_path / "pages").as_posix(): page.read_text(encoding="utf-8") for page in (tmp_path / "pages").rglob("*.md")
    }
    described = [
        name for text in texts.values() for name in re.findall(r"^\.\. auto(?:class|function):: inchworm\.(\w+)$", text, re.MULTILINE)
    ]
    with_optional = {name for name, _ in make_site.api_names()}
    assert sorted(described) == sorted(with_optional)
    assert with_optional >= set(inchworm.__all__) - {"__version__"}
    trees = "\n".join(re.findall(r"^```{toctree}\n(.*?)^```$", texts["index.md"], re.MULTILINE | re.DOTALL))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= set(trees.split())


def test_the_notebook_of_the_tutorial_has_its_blocks_and_text() -> None:
    """The page runs as a test, so its notebook does if the cells are the same."""
    module = site("make_notebook")
    assert module.NOTEBOOK.read_text(encoding="utf-8") == module.content(), "the notebook is out of date; type: make docs"
    cells = json.loads(module.content())["cells"]
    assert ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"] == [
        code.strip() for _, code in blocks(module.PAGE, "python")
    ]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (module.NOTEBOOK.parent / target).exists(), target


def test_every_setting_of_ppo_has_advice() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \| (.+) \| (.*) \|$", (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(name for name, *_ in rows) == sorted(PPOConfig().to_dict())


def test_the_troubleshooting_page_answers_the_usual_problems_with_settings_that_exist() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    assert {"training-is-slow-or-does-not-improve", "training-is-unstable", "nan-or-infinity", "out-of-memory"} <= anchors(page)
    text = page.read_text(encoding="utf-8")
    sections = TrainingConfig().to_dict()
    named = set(re.findall(rf"`({'|'.join(sections)})\.(\w+)[`= ]", text))
    assert {("ppo", "learning_rate"), ("ppo", "max_grad_norm"), ("ppo", "rollout_steps"), ("convergence", "window")} <= named
    assert not [f"{section}.{field}" for section, field in named if field not in sections[section]]
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in ("approx_kl", "clip_fraction", "entropy", "explained_variance", "grad_norm", "value_loss", "convergence/mean_return"):
        assert f"`{metric}`" in text, metric
        assert f"`{metric}`" in metrics, metric


def test_the_defaults_of_stable_baselines3_are_those_of_its_signature() -> None:
    from stable_baselines3 import PPO

    there = inspect.signature(PPO).parameters
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    section = text.partition("\n## Stable-Baselines3\n")[2].partition("\n## ")[0]
    compared = set()
    for names, values in re.findall(r"^\| (`.+?) \| ([^|]+) \|", section, re.MULTILINE):
        listed = re.findall(r"`(\w+)`", names)
        defaults = values.replace("*", "").split(", ")
        if len(listed) == len(defaults) and set(listed) <= set(there) and re.match(r"none|\d", defaults[0]):
            compared |= set(listed)
            assert [there[one].default for one in listed] == [None if one == "none" else float(one) for one in defaults], names
    assert len(compared) == 12, compared


def test_the_overview_lists_every_step_in_order() -> None:
    rows = re.findall(r"^\| (\d) \| \[([\w/]+\.py)\]", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 10))


def test_pages_contain_no_local_paths() -> None:
    """No page contains a path or host name of the machine it was written on."""
    for page in PAGES:
        assert not re.search(r"/roo[t]/|/home/|/tmp/|file://|localhost", page.read_text(encoding="utf-8")), name(page)


class Succeeds(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose `info` also has whether the episode was long, and the game's result."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"is_success": truncated, "win": float(truncated), "hp_margin": 0.5}


def logged_names(env: Any, policy: Any = None, losses: Sequence[Callable[..., Any]] = (), cap: int = 1_000, **sections: Any) -> set[str]:
    """The names of all metrics that a short run logs."""
    rows = Recorder()
    config = TrainingConfig(
        ppo=PPOConfig(rollout_steps=16, update_epochs=1, num_minibatches=1, scale_rewards=True),
        evaluation=EvalConfig(interval=2, episodes=2, final_episodes=2, num_envs=2, max_episode_steps=cap, baseline="random"),
        convergence=ConvergenceConfig(target=1e9, window=1),
        run=RunConfig(total_timesteps=10**9, max_iterations=2, backend="torch"),  # which derives custom losses
        **sections,
    )
    small = PolicyConfig(hidden_sizes=(4,), normalize_observations=True)
    with PPOTrainer(policy or small, env, config, num_envs=2, trackers=[rows]) as trainer:
        trainer.train(custom_loss_fns=losses)
    return {name for _, row in rows.rows for name in row} | {"env_steps"}  # the step is given beside the row


def test_the_page_of_metrics_has_every_name_that_is_logged_and_no_other() -> None:
    def calm(values: Any) -> Any:
        return values.square().mean()

    game = EnvConfig(id="Skirmish-v0", num_workers=0, kwargs={"units": ["scout"], "max_steps": 8, "wall_pairs": 0})
    league = {"snapshot_interval": 1, "pool_size": 2, "rating_interval": 1, "rating_episodes": 2}
    logged = logged_names(lambda: Succeeds(gym.make("CartPole-v1", max_episode_steps=5)), losses=[Loss(calm, weight=0.5)])
    logged |= logged_names(game, opponent=OpponentConfig(mode="self_play", **league))
    logged |= logged_names(game, opponent=OpponentConfig(mode="heuristic", skill_start=0.3), cap=3)
    logged |= logged_names(lambda: Succeeds(gym.make("CartPole-v1", max_episode_steps=5)), curriculum=CurriculumConfig(mode="progress"))
    logged |= logged_names(EnvConfig(num_workers=0), PolicyConfig(kind="gru", hidden_sizes=(4,), memory_size=4))
    duo = PolicyMap(policies={"one": "mlp", "two": "mlp"}, lane_map=["one", "two", "one"])
    parts = logged_names(lambda: comings(plan=DEATHS, masks="info"), duo)
    logged |= {re.sub("^(one|two)/", "", name) for name in parts}
    assert {f"{part}/n_updates" for part in duo.policies} <= parts
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    listed = {found for row in rows for found in re.findall(r"`([^`]+)`", row)} - {"<part>/<metric>"}
    patterns = {name: re.compile(re.sub(r"<\w+>", ".+", name)) for name in listed}
    assert not [name for name in logged if not any(pattern.fullmatch(name) for pattern in patterns.values())]
    rare = {"rating_failed", "evaluation/failed", "behavior_kl"}  # only after an error, and with rollouts of other weights
    absent = {name for name, pattern in patterns.items() if not any(pattern.fullmatch(one) for one in logged)} - rare
    assert not absent
