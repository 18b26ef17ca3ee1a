"""What is checked before the ranks start: configuration, host, memory, and that the run is the same run."""
