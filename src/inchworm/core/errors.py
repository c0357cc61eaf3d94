"""Every error that inchworm raises on purpose: one family, each message says what happened, where, and what to type."""

from __future__ import annotations


class InchwormError(Exception):
    """Base of all errors that are about the user's input or world, not about a defect in inchworm."""


class ConfigError(InchwormError):
    """A config field that is unknown, of the wrong type, out of range, or at odds with another."""


class RolloutError(InchwormError, ValueError):
    """Rollout data that lacks a key or has a wrong shape or dtype."""


class SpaceError(InchwormError, ValueError):
    """A space that policies cannot be built for, or a value that is not in its space."""


class CorruptFileError(InchwormError):
    """A file that fails its checksum, its header or its schema."""


class BadNumberError(InchwormError, FloatingPointError):
    """An observation, reward, loss or gradient that is not finite."""


class EnvError(InchwormError):
    """An environment broke its contract."""


class WorkerError(EnvError):
    """An environment raised inside a worker process, or the worker died or hung."""


class WorkerRestartWarning(UserWarning):
    """A worker process died or hung and was replaced; the run continues with the same results."""


class SaveError(InchwormError):
    """The last save of a run failed; earlier checkpoints are intact."""


class MissingExtraError(InchwormError, ImportError):
    """An optional package is not installed; the message is the pip line to type."""


USAGE_ERRORS = (ConfigError, SpaceError, MissingExtraError)
"""What is wrong before anything has begun: commands exit with code 2 and leave nothing behind."""
