"""Flags of other trainers (CleanRL, Stable-Baselines3 and its zoo, …): what they are called here, or why there is none.

Words that are fields of a config here (`--gamma`) and names that configs accept (`config/legacy.py`) need no entry.
"""

from __future__ import annotations

from inchworm.config.legacy import current_name

_PUSH = "runs are delivered by trackers: --tracking.mlflow.uri URL or --tracking.wandb.project NAME, later by inchworm ship"
_WATCH = "gradients are not recorded one by one; grad_norm is a metric"
_ENV = "give the environment as the first argument: inchworm train CartPole-v1"
_RESUME = "type inchworm resume RUN to continue a run"
_VIDEO = "make the environment in a factory of your own, with gymnasium.wrappers.RecordVideo around it"
_PROGRESS = "progress is shown unless --quiet is given"

OTHER_FLAGS = {
    "--total-timesteps": ("-n", "--n-timesteps", "--num-timesteps", "--timesteps", "--total-steps", "--max-steps", "--steps", "--frames"),
    "--run.max-iterations": ("--updates", "--num-updates", "--total-updates", "--iterations", "--num-iterations", "--n-iterations"),
    "--run.max-episodes": ("--num-episodes", "--n-episodes"),
    "--run.name": ("--exp-name", "--experiment-name", "--run-name"),
    "--run.directory": ("-f", "--log-folder", "--log-dir", "--logdir", "--save-dir", "--output-dir", "--out-dir"),
    "--run.checkpoint-interval": ("--save-every", "--save-interval", "--save-freq", "--checkpoint-every", "--checkpoint-freq"),
    "--run.log-interval": ("--log-every", "--log-freq"),
    "--run.threads": ("--num-threads", "--n-threads", "--torch-threads"),
    "--run.device cuda": ("--cuda", "--gpu", "--use-cuda"),
    "--run.device cpu": ("--cpu", "--no-cuda"),
    "--env.num-envs": ("--n-envs", "--num-env", "--envs"),
    "--env.num-workers": ("--n-workers", "--workers", "--num-processes", "--num-cpu", "--vec-env", "--num-env-runners"),
    "--env.kwargs": ("--env-kwargs", "--env-args"),
    "--env.frame-stack": ("--framestack", "--n-stack", "--num-stack"),
    "--evaluation.interval (counted in iterations)": ("--eval-every", "--eval-freq", "--eval-interval", "--evaluate-every"),
    "--evaluation.episodes": ("--n-eval-episodes", "--num-eval-episodes"),
    "--evaluation.num-envs": ("--n-eval-envs", "--num-eval-envs"),
    "--tracking.wandb.project NAME": ("--track", "--wandb", "--use-wandb", "--wandb-project", "--wandb-project-name"),
    "--tracking.wandb.name": ("--wandb-run-name", "--wandb-name"),
    "--tracking.wandb.mode": ("--wandb-mode",),
    "--tracking.wandb.entity": ("--wandb-entity",),
    "--tracking.wandb.group": ("--wandb-group",),
    "--tracking.wandb.tags": ("--wandb-tags",),
    "--tracking.mlflow.experiment NAME": ("--mlflow", "--use-mlflow", "--enable-mlflow", "--mlflow-experiment"),
    "--tracking.mlflow.uri": ("--mlflow-uri", "--tracking-uri", "--mlflow-tracking-uri"),
    "--tracking.tensorboard": ("--tensorboard-log", "--tb", "--logger"),
    "--convergence.target": ("--reward-threshold", "--stop-reward"),
    "--ppo.rollout-steps": ("--num-steps", "--horizon", "--unroll-length", "--steps-per-env", "--n-step"),
    "--ppo.minibatch-size": ("--batch-size", "--mini-batch-size", "--sgd-minibatch-size"),
    "--ppo.num-minibatches": ("--n-minibatches", "--nminibatches", "--num-mini-batch", "--minibatches"),
    "--ppo.update-epochs": ("--epochs", "--ppo-epochs", "--ppo-epoch", "--num-epochs", "--k-epochs", "--num-sgd-iter", "--noptepochs"),
    "--ppo.learning-rate-schedule linear": ("--anneal-lr", "--lr-decay", "--use-linear-lr-decay", "--lr-schedule"),
    "--ppo.gae-lambda": ("--lam", "--lambda", "--gae-lam", "--tau"),
    "--ppo.clip-coef": ("--clip", "--clip-param", "--clip-ratio", "--clip-eps", "--eps-clip"),
    "--ppo.clip-vloss": ("--clip-range-vf", "--vf-clip-param", "--clip-value"),
    "--ppo.vf-coef (twice theirs if their value loss has no factor 1/2)": ("--value-coef", "--value-loss-coef", "--vf-coeff"),
    "--ppo.ent-coef": ("--entropy-coeff", "--ent-coeff", "--entropy", "--entropy-bonus"),
    "--ppo.max-grad-norm": ("--grad-clip", "--clip-grad", "--grad-norm"),
    "--ppo.target-kl": ("--kl-target", "--max-kl"),
    "--ppo.normalize-advantages": ("--norm-adv", "--normalize-advantage", "--adv-norm"),
    "--ppo.scale-rewards": ("--norm-reward", "--norm-rewards", "--normalize-reward", "--reward-norm", "--norm-rew"),
    "--policy.normalize-observations": ("--norm-obs", "--normalize", "--normalize-obs", "--obs-norm"),
    "--policy.hidden-sizes": ("--hidden-size", "--hidden-dim", "--net-arch", "--hidden-units", "--hiddens"),
    "--policy.kind lstm": ("--lstm", "--use-lstm", "--recurrent", "--recurrent-policy"),
    "--policy.kind": ("--policy", "--network", "--model", "--arch"),
    "--opponent.mode": ("--train-mode", "--self-play", "--selfplay"),
    "--env.kwargs '{width: 20, height: 20}'": ("--size",),
    "--config": ("-conf", "--conf-file", "--config-file", "--hyperparams", "--yaml", "--cfg"),
}
"""The flag here, with a value or a note -> its names elsewhere."""

NO_FLAG = {
    _PUSH: ("--push-url",),
    _WATCH: ("--wandb-watch", "--wandb-watch-freq"),
    "a resumed run continues its W&B run: inchworm resume RUN": ("--wandb-id", "--wandb-resume"),
    _ENV: ("--env", "--env-id", "--env-name", "--gym-id", "--task", "--game"),
    _RESUME: ("-i", "--trained-agent", "--resume", "--load", "--load-checkpoint", "--checkpoint", "--restore"),
    _VIDEO: ("--capture-video", "--record-video", "--video", "--render"),
    _PROGRESS: ("-P", "--progress", "--progress-bar", "--verbose", "-v"),
    "PPO is the only algorithm, so leave it out": ("--algo", "--algorithm", "--agent"),
    "runs are deterministic without it": ("--torch-deterministic", "--cudnn-deterministic"),
    "the policy is always saved in the directory of the run": ("--save-model", "--save-policy"),
    "name the package with the environment: inchworm train package:Id": ("--gym-packages", "--env-package"),
    "a run optimises no hyperparameters; start one run for each setting": ("--optimize", "-optimize", "--n-trials", "--sweep"),
}  # fmt: skip
"""What to do instead -> names of flags that do not exist here."""


def explain_other_flag(name: str, known: set[str]) -> str | None:
    """What to type instead of a flag of another trainer; None if it is not known. `known` are the flags of the command."""
    if "." in name:  # a word of theirs in a section of ours, as --ppo.value-coef
        name = f"--{name.rpartition('.')[2]}"
    for text, names in NO_FLAG.items():
        if name in names:
            return text
    legacy = current_name(name.lstrip("-").replace("-", "_"))
    here = next((flag for flag, names in OTHER_FLAGS.items() if name in names), None)
    here = here or (None if legacy is None else "--" + legacy.replace("_", "-"))
    if here is None:
        return None
    flag, space, note = here.partition(" ")
    short = "--" + flag.lstrip("-").rpartition(".")[2]
    if flag not in known and short not in known:
        return f"it is called {here} in inchworm train"
    return f"it is called {flag if flag in known else short}{space}{note} here"  # --num-envs of evaluate has no section
