"""Many short guarded runs with one fault each, to measure what is caught where.

spec.py     a TOML file → frozen data      trials.py   → every trial, what is left open drawn by its name
trial.py    one trial on the ranks         runner.py   the queue, resumable, on warm pools of ranks
outcome.py  what a trial is counted as     tables.py   → rates and intervals      page.py, report.py  → files
"""
