"""Answers to test questions, and what they score."""
