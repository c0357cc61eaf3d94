"""Self-play: a pool of past versions of the policy, ratings, and the callback that updates them."""
