"""The live panel of `holdfast train` on a terminal: `run_view` reads the run's files, `screen` draws."""
