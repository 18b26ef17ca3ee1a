"""The one command-line parser: flags from options dataclasses, help pages, shell completion."""
