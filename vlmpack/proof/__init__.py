"""The project's point: packing changes nothing but the speed, and anyone can check it.

verify   the model against the stock one: packed equals unpacked
rows     a packed row against its samples
audit    a run against its plan: every draw trained once, or accounted for
judge    anybody's batches against their samples, on anybody's model

precision: float32 means float32 meanwhile, on a GPU too.
"""
