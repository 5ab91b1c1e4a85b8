"""The transformers + accelerate engine."""
