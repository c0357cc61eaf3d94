"""Acting and learning, one implementation per framework behind one registry; the order of an update is shared.

May import `core`, `config`, `rollout` and `policy`. A backend never imports another one's framework.
"""
