"""Looking at runs: reports, plots, a live page and a doctor, all from the files of a run.

`runs` reads a run directory, `curves` makes series and statistics of it, `charts` draws them, `report` is the page, `watch` serves it.
"""
