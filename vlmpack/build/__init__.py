"""Reads the recipe and divides it into four values, one for each room.

data        DataSpec, the splits with their encoder. Opens them
engine      EngineSpec, the model, layout and policy. Checks the model folder and builds the engine
objective   ObjectiveSpec, what is minimised, and how. Builds the stepper
run         RunSpec, what happens around the steps, and the run's length and date
extensions  what a program passes besides the recipe, compared across ranks; `source_text`
            fingerprints its code, and `checked_objective` checks its objective
look        opens a recipe or a run folder read-only
worker_server  the server that loader processes fork from
"""
