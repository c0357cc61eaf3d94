"""Steps 1 and 2 of 9: the worlds, and how many copies of one are stepped as one."""
