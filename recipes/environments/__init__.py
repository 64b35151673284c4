"""Environments of the recipes: plain classes that TRL's `environment_factory` takes too."""
