"""The chain: trees, stages, order rules, combinators. It knows no compressor and no exchange."""
