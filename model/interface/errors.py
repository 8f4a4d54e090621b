"""Errors of the model side that a user can cause. Each message names the file or field and the remedy.
Imports no torch."""


class ModelError(Exception):
    """Base of everything a user can cause on the model side; the text is fit to be shown as it is."""


class ConfigError(ModelError):
    """A model configuration, or a start-up setting of the model, that is invalid or not supported."""


class CheckpointError(ModelError):
    """A checkpoint file that is missing, damaged, hostile or not understood."""
