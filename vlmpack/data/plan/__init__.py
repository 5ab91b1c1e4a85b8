"""Which samples make up each global batch, and where a run stands. Pure functions."""
