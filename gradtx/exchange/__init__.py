"""Ranks talking: groups, the handshake, what goes out and what comes in."""
