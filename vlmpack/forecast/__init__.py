"""What a run would do, worked out from lengths alone: `vlmpack plan`.

open           recipe -> the samples of `data.train`, their plan, the model's sizes
make           these -> RunPlan, every figure of the page: numpy only, nothing is read
modes          the packing modes side by side, with rows and slots of each
sources        what is in the data, and what a bound on the samples of a row costs
parameters     a model's sizes, layer by layer
trained        what of it is trained
memory, activations, communication    what a rank must hold, and what it sends
measure        `plan --measure`: how long the run takes, by each choice that changes no loss
launched       the first steps of a run, as processes of their own, and their speed
figures        what all of these find
"""
