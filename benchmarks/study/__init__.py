"""The study: which optimizer is worth its cost in continual learning; defined and frozen before it was run.

`definition` says what is run and how it is judged, `tuning` how settings are chosen, `analysis` how verdicts are
reached; their hash is in every line of the ledger. `python -m benchmarks.study --help` runs it and writes its pages.
"""
