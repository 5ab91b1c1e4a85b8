"""A packed row against its samples: opened, taken apart, checked, shown.

opening       recipe -> the row that was asked for (by number, by global batch, by a sample's key)
row           a row as `Row`: the batch that training would get, taken apart, and each sample alone
checks        `Row` -> what must hold of a packed row, recomputed without the collator's code
              (slices_check: of the CP ranks' slices; unfold: of rows with shared prefixes;
              findings: what they have in common)
show          one sample as training sees it
first_sample  what a run's first sample teaches, printed at its start
"""
