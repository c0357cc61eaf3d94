"""Looking at runs: reports, plots, a live page and a doctor, all from the files of a run."""
