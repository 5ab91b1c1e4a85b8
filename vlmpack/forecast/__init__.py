"""What a run would do, worked out from lengths alone: `vlmpack plan`.

    open_plan     recipe -> the samples of `data.train`, their plan, the model's sizes
    plan_figures  these -> RunPlan, every figure of the page: numpy only, nothing is read

`layout` counts rows and slots, `modes` compares the packing modes, `sources` says what is in the
data, `sequences` what a bound on the samples of a row costs, `imbalance` how far apart the ranks
end, `batch` what a step trains, `parameters` and `memory` what a rank must hold.
"""
