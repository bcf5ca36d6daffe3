"""Compute rewards: functions in worker processes, models, and their sums.

`combination` has the results and their sum, `functions` the call of a function, `children` the
processes and threads that make it, `workers` their pool, `sources` the specs of a config, `models`
the models that score, `samples` the rewards of a roll-out.
"""
