"""Offline accuracy evaluation: tasks, scoring, and a runner whose results survive a kill."""
