"""`check_policy`: does a policy act and learn as the contracts require?

May import everything but `cli`.
"""
