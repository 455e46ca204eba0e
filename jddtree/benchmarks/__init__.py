"""Measurements: each module prints a table and can write its rows to a results file."""
