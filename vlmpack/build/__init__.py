"""Reads the recipe and divides it into four values, one for each room.

data        DataSpec: the splits with their encoder; opens them
engine      EngineSpec: model, layout and policy; checks the model folder and builds the engine
objective   ObjectiveSpec: what is minimised, and how; builds the stepper
run         RunSpec: what happens around the steps; the run's length and date
extensions  what a program passes besides the recipe, compared across ranks; `source_text`
            fingerprints its code, and `checked_objective` checks its objective
look        opens a recipe or a run folder read-only
worker_server  the server that loader processes fork from
"""
