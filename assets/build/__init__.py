"""Scripts that make everything under `assets/`: tokenizer, model, pretraining, digit shards."""
