"""The sweep over every class of transformers: which of them the generic family trains, and why not.

tiny_config   the class's config with small sizes
classes       what a class wants beyond that
folder        a model folder: tokenizer, processor, random weights
samples       a shard of conversations with 0, 1, 2 and 3 images
one           one class: folder -> `verify`, image sizes, the stock processor -> a word
run           all classes, each in a process of its own -> the table
"""
