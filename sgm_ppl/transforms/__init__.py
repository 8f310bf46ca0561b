"""Families of transformations, each a group."""
