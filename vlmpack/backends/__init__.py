"""Engines: the only place with heavy imports."""
