"""The only folder that imports torch."""
