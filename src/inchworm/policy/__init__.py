"""What a policy is besides the framework that runs it: its spec, its layouts, its file."""
