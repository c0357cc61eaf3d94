"""Procedures to come."""
