"""Acting and learning, one implementation per framework behind one registry; the order of an update is shared."""
