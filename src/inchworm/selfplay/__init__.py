"""Opponents that change as the policy does: pools of past selves, ratings against fixed players. Serves steps 2 and the loop."""
