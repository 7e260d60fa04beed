"""What exchanges would cost on other ranks and links: ``python -m gradtx plan``."""
