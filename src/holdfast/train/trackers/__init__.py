"""Experiment trackers: Weights & Biases, MLflow, trackio, a Prometheus endpoint.

One process beside rank 0 follows metrics.jsonl and sends each iteration once. A tracker that is slow, unreachable or broken
therefore never delays or ends a training step, and what it missed is sent later.
"""
