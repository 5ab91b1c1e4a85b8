"""A run against its plan: every draw of an epoch trained once, or accounted for."""
