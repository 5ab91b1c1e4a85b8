"""Packs made before training (`vlmpack pack`, `packing.mode: offline`) and how a run uses them.

choose -> arrays      which samples share a pack: the online plan's first epoch, or bfd
write, part_jobs, spans  the folder: pack.json last, so that an unfinished one does not look whole
open, compare         the folder as a split, or every way in which it does not fit the recipe
restore               a saved pack -> encoded samples
"""
