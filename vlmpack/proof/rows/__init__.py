"""A packed row against its samples: opened, taken apart, checked, shown.

opening   recipe -> the requested row (by number, by global batch, by a sample's key)
row       a row as `Row`: the batch as training gets it, taken apart, and each sample alone, and
without the prefixes that it shares
checks    `Row` -> what must hold of a packed row, recomputed without the collator's code
view      a batch as text, with what is learnt; a run's first sample, printed at its start
"""
