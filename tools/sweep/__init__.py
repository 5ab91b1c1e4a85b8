"""The sweep tries every class of transformers: which of them can the generic family train?

run       all classes, each in a process of its own -> vlmpack/capabilities/swept*.json
one       one class: a tiny folder and a shard -> `verify`, image sizes, an export -> a word
folder    the tiny folder: config with small sizes, tokenizer, processor, random weights
classes   what single classes want beyond that, and which are refused with a reason
"""
