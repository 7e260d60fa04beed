"""Compressors measured on gradients: ``python -m gradtx compressors``."""
