"""`convert`: Hugging Face folders to a store; a bar in bytes on stderr, what was done on stdout."""

import json
import shutil
from pathlib import Path
from typing import Any

from converters.storage.convert import Outcome, convert
from converters.storage.plan import PartPlan
from jddtree.cli.ending import interrupts
from jddtree.cli.options import ConvertOptions, QuietOptions
from jddtree.cli.terminal.progress import Bars

GB = 1e9


def run(options: ConvertOptions, quiet: QuietOptions) -> None:
    """Run the command.

    Raises UserError as `converters.storage.convert.convert`; after a dry run too when tensors are missing or
    not wanted.
    """
    interrupts.keep()
    with Bars(quiet.quiet or quiet.json_output) as bar:
        outcome = convert(
            options.target,
            options.draft,
            options.out,
            dry_run=options.dry_run,
            verify=options.verify,
            force=options.force,
            progress=bar.update,
        )
    if quiet.json_output:
        print(json.dumps(summary(outcome, options.out)))
    elif not quiet.quiet:
        print(plan_text(outcome, options.out) if options.dry_run else outcome_text(outcome, options.out))
    outcome.plan.require_sound()


def summary(outcome: Outcome, out: Path) -> dict[str, Any]:
    """What --json prints; sizes in bytes."""
    return {
        "out": str(out),
        "store_bytes": outcome.plan.nbytes,
        "written_bytes": outcome.written,
        "resumed_bytes": outcome.resumed,
        "compared_blocks": outcome.compared,
        "seconds": outcome.seconds,
        "parts": {part.name: _part(part) for part in outcome.plan.parts},
    }


def _part(part: PartPlan) -> dict[str, Any]:
    report = part.reader.report("bfloat16")
    return {
        "folder": str(part.folder),
        "tensors": report.tensors,
        "tensor_bytes": report.file_bytes,
        "skipped_tensors": report.skipped_tensors,
        "skipped_bytes": report.skipped_bytes,
        "files": len(part.sizes),
        "bytes": sum(part.sizes.values()),
        "copied": list(part.copied),
        "faults": list(part.faults),
        "notes": list(report.notes),
    }


def plan_text(outcome: Outcome, out: Path) -> str:
    """What --dry-run prints."""
    lines = []
    for part in outcome.plan.parts:
        values = _part(part)
        lines.append(f"{part.name}: {part.folder}")
        lines.append(f"  reads   {values['tensors']:>9,} tensors {values['tensor_bytes'] / GB:12.3f} GB")
        if values["skipped_tensors"]:
            size = values["skipped_bytes"] / GB
            lines.append(f"  skips   {values['skipped_tensors']:>9,} tensors {size:12.3f} GB (vision)")
        lines.append(f"  writes  {values['files']:>9,} files   {values['bytes'] / GB:12.3f} GB")
        lines.append(f"  copies  {', '.join(part.copied)}")
        lines += [f"  {fault}" for fault in part.faults or ("no tensors missing, none unexpected",)]
        lines += [f"  note: {note}" for note in values["notes"]]
    there = next(path for path in (out, *out.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    lines.append(f"store: {out}, {outcome.plan.nbytes / GB:.3f} GB; {free / GB:.3f} GB are free on its disk")
    return "\n".join(lines)


def outcome_text(outcome: Outcome, out: Path) -> str:
    """What a conversion or a check prints."""
    lines = []
    if outcome.written:
        found = f", {outcome.resumed / GB:.3f} GB were there from an earlier run" if outcome.resumed else ""
        lines.append(f"{out}: wrote {outcome.written / GB:.3f} GB in {outcome.seconds:.1f} s{found}")
    if outcome.compared is not None:
        lines.append(f"{out}: all checksums are right, {outcome.compared} blocks equal their source")
    return "\n".join(lines or [f"{out}: complete"])
