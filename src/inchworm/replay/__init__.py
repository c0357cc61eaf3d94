"""Replays: one game as plain data in a JSON file, and as a page to watch it on. Serves evaluation."""

from inchworm.replay.format import check_replay, load_replay, save_replay
from inchworm.replay.page import replay_page

__all__ = ["check_replay", "load_replay", "replay_page", "save_replay"]
