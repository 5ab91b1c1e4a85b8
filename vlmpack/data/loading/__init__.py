"""From planned bins to micro-batches, and the ledger of what was left out."""
