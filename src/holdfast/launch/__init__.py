"""Where verbs run: this machine's ranks, a Slurm job, a Kubernetes job."""
