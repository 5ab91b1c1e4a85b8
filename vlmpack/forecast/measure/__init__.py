"""How long a run takes, from its own first steps on the device that is there.

launched    recipe -> its first steps, as processes of their own, and the speed of a mean step
measure     that of each choice which changes no loss, and of what surrounds the steps
"""

from vlmpack.forecast.measure.measure import measure_plan

__all__ = ["measure_plan"]
