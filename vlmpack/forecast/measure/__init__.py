"""How long a run takes, from its own first steps on the device that is there.

choices     recipe -> what could be set otherwise without changing a loss
launched    recipe -> its first steps, as processes of their own, until enough are measured
speed       rows of metrics.jsonl -> seconds of a step, of a token
trials      each choice's first steps, the fastest ones twice -> the choices, ranked
surroundings  a run of two steps -> seconds of launch, validation, answers, checkpoint, export
measure     all of these, and the plan's counts -> MeasuredFigures
"""

from vlmpack.forecast.measure.measure import measure_plan

__all__ = ["measure_plan"]
