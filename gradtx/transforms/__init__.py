"""Transformations from dense gradients to dense gradients."""
