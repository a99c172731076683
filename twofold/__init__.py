"""Twofold: the same language model, several times faster."""

__version__ = "0.1.0"
