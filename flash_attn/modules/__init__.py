"""Modules built on the attention functions."""
