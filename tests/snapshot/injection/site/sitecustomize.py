"""Installs the fault layer in a keeper that is a new interpreter; `layer.Layer.environment` puts this folder on its path."""

import sys

if "holdfast.snapshot.keeper.service" in sys.orig_argv:
    from tests.snapshot.injection.layer import install_from_environment

    install_from_environment()
