"""Names of files that an index or a manifest gives, which are content that somebody else wrote.

Contract: a name is used only when `inside` says that it stays in its folder; folders in it are fine. That is
judged by the name alone: a link on the disk is followed, wherever it leads. Hugging Face caches consist of
links to files beside the folder, and a link was put there by whoever owns the folder, not by the index.
"""

PART_BYTES = 255  # what file systems allow for one part of a path
NAME_BYTES = 1024


def inside(name: object) -> bool:
    """Whether this is a relative path, in plain form, that does not leave its folder."""
    # Neither line ends, NUL nor half of a surrogate pair.
    if not isinstance(name, str) or not name.isprintable():
        return False
    parts = name.split("/")
    plain = not {"", ".", ".."} & set(parts)
    return (
        plain and len(name.encode()) <= NAME_BYTES and all(len(part.encode()) <= PART_BYTES for part in parts)
    )
