"""Hugging Face folders to a store: what may be converted where, and what to do with what is there.

`converters.storage.conversion` does the work.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from converters.storage.conversion import Conversion, StageProgress
from converters.storage.manifest import JOURNAL, MANIFEST
from converters.storage.plan import Plan, make_plan
from converters.storage.store import Store
from converters.storage.verify import compare
from jddtree.errors import UserError


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    written, resumed: bytes of .bin files written by this call, and found from earlier ones. compared: blocks
    that --verify compared with the source, None without it. seconds: of everything.
    """

    plan: Plan
    written: int = 0
    resumed: int = 0
    compared: int | None = None
    seconds: float = 0.0


def convert(
    target: Path,
    draft: Path | None,
    out: Path,
    *,
    dry_run: bool = False,
    verify: bool = False,
    force: bool = False,
    progress: StageProgress | None = None,
) -> Outcome:
    """Convert a Kimi K2.6 folder, and a DFlash drafter folder, to the store `out`; go on with an unfinished
    one.

    dry_run: only plan; nothing is written and faults are only in the plan. verify: check all checksums and
    compare samples with the source, afterwards, or only that when `out` is complete. force: start over.
    progress: called with ("Converting" or "Verifying", bytes done, bytes in all). Raises UserError for
    folders that cannot be converted (all differences in one), a complete store without `force` or `verify`, a
    folder with other content, a source that changed since the conversion began, another conversion into the
    same folder, a full disk, and what `verify` finds.
    """
    begun, out = time.perf_counter(), Path(out)
    plan = make_plan(target, draft)
    if dry_run:
        return Outcome(plan)
    plan.require_sound()
    done, resumed = 0, plan.nbytes
    if force or not (verify and _complete(out)):
        _check_folder(out, plan, force)
        done, resumed = Conversion(plan, out, progress).run(force)
    compared = compare(plan, Store(out), progress) if verify else None
    return Outcome(plan, done, resumed, compared, time.perf_counter() - begun)


def _complete(out: Path) -> bool:
    return (out / MANIFEST).is_file() and not (out / JOURNAL).exists()


def _check_folder(out: Path, plan: Plan, force: bool) -> None:
    """Raise UserError for a folder that must not be written to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a new folder")
    if _complete(out) and not force:
        raise UserError(f"{out} is a complete store; check it with --verify, or make it again with --force")
    ours = (out / JOURNAL).exists() or (out / MANIFEST).is_file()
    if not ours and out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"--out {out} has other files and no unfinished conversion; give a new or an empty folder"
        )
    if any(out.resolve().is_relative_to(part.folder.resolve()) for part in plan.parts):
        raise UserError(f"--out {out} lies in a folder that is read; give another one")
