"""The one exception that decoding bytes may raise."""


class WireFormatError(ValueError):
    """Bytes that came from the network are not what the format and the agreed shapes allow.

    The text says what was found and what was expected. Decoders raise nothing else on bad bytes.

    Example:
        >>> from gradtx.wire import WireFormatError
        >>> issubclass(WireFormatError, ValueError)
        True
    """
