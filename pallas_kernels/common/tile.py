"""The size of a Triton tile, a power of two."""


def padded_size(size: int, least: int = 1) -> int:
    """The power of two that covers `size`, as Triton's tiles need, and at least `least`."""
    return max(least, 1 << (size - 1).bit_length())
