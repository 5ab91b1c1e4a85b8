"""The project's point: packing changes nothing but the speed, and anyone can check it.

verify    the model against the stock one: packed equals unpacked
judge     anybody's batches against their samples, on anybody's model
rows      a packed row against its samples
audit     a run against its plan: every draw trained once, or accounted for
measure   bounds, errors, the change of a sample, leaks, and float32 without TF32
stock     what verify and judge ask of a stock model
"""
