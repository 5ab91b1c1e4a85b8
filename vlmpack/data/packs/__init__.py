"""Packs made before training (`vlmpack pack`, `packing.mode: offline`) and how a run uses them.

write      which samples share a pack (the online plan's first epoch, or bfd), and the folder.
           pack.json is written last, so that an unfinished folder does not look whole
spans      a pack in a tar, and the tars; no videos
manifest   pack.json and the small files, or every way in which they do not fit the recipe
open       the folder as a split, and a saved pack -> encoded samples
"""
