"""Measurements of each stage beside the tools that a user would otherwise pick, in the same run on the same machine."""
