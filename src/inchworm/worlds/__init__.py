"""Environments that come with inchworm: native CartPole, toy environments with known optima, a game of two teams, replays."""
