"""Whether a store is what its source gives: all checksums, the source's fingerprint, and samples value by
value.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from converters.pieces import Block, Index, Reader, layout, whole, workers
from converters.storage.plan import PartPlan, Plan, changes
from converters.storage.store import Store
from jddtree.errors import UserError

SAMPLES = 64  # blocks compared besides one of every parameter
SEED = 0
LISTED = 4  # places in one error


def compare(plan: Plan, store: Store, progress: Callable[[str, int, int], None] | None = None) -> int:
    """Check every checksum of the store and compare one block of every parameter, and more, with the source.

    progress: called with ("Verifying", bytes done, bytes in all). Returns how many blocks were compared.
    Raises UserError naming damaged files, what of the source is not what the store was made from, and values
    that differ.
    """
    store.check(None if progress is None else lambda done, total: progress("Verifying", done, total))
    made = {name: part.source for name, part in store.parts.items()}
    found = changes({"parts": made}, {"parts": {part.name: part.source for part in plan.parts}})
    if found:
        raise UserError(
            f"{store.directory} was made from another source: {', '.join(found)}; give the one it was "
            "made from"
        )
    chosen = _sample(plan)
    readers = {part.name: store.reader(part.name) for part in plan.parts}
    with ThreadPoolExecutor(workers()) as pool:
        results = pool.map(lambda item: _differing(item[0], item[1], readers[item[0].name]), chosen)
        wrong = [name for names in results for name in names]
    if wrong:
        raise UserError(
            f"{store.directory} differs from its source in {', '.join(wrong[:4])}; convert again with --force"
        )
    return len(chosen)


def _sample(plan: Plan) -> list[tuple[PartPlan, Block]]:
    """The same blocks every time: the last of every parameter, and some of all."""
    last = {(part.name, block.paths): (part, block) for part, block in plan.blocks}
    return [*last.values(), *random.Random(SEED).sample(plan.blocks, min(SAMPLES, len(plan.blocks)))]


def _differing(part: PartPlan, block: Block, stored: Reader) -> list[str]:
    """Places of one block in which source and store are not the same bytes."""
    found = []
    for path in block.paths:
        index = (slice(block.start, block.stop), *whole(layout(part.reader.table, path).shape[1:]))
        left, right = (_values(reader, path, block.piece, index, part) for reader in (part.reader, stored))
        if left.tobytes() != right.tobytes():
            found.append(f"{part.name}/{path} piece {block.piece} rows {block.start} to {block.stop - 1}")
    return found


def _values(reader: Reader, path: str, piece: int, index: Index, part: PartPlan) -> np.ndarray:
    values = np.empty([side.stop - side.start for side in index], part.reader.stored(path))
    reader.fill(path, piece, index, values)
    return values
