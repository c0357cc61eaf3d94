"""`check_policy`: tests whether a policy acts and learns as the `Policy` protocol requires."""
