"""`trace`: a generation with every tree recorded, and a picture of the round that tells most."""

from pathlib import Path

from jddtree.cli.generate import default_prompt
from jddtree.cli.opening import open_model
from jddtree.cli.options import ModelOptions, TraceOptions
from jddtree.decoding.requests import Request
from jddtree.errors import UserError
from jddtree.evaluation.speculation import recording, tree_picture
from jddtree.evaluation.speculation.report import make_recorder
from jddtree.loading import Model
from jddtree.prompts import prompt_ids


def run(options: TraceOptions, model: ModelOptions) -> None:
    """Run the command. Raises UserError when the text ended with its first token, so that there was no
    round.
    """
    loaded = open_model(model, False)
    prompt = default_prompt(loaded) if options.prompt is None else options.prompt
    ids = prompt_ids(loaded, prompt, raw=options.raw)
    request = Request(ids, options.max_tokens, "tree", options.budget, stop_ids=loaded.stop_ids)
    (recorded,) = recording.record(make_recorder(loaded, [request]), [request])
    if not recorded.rounds:
        raise UserError("the text ended with its first token, so there was no round; give another --prompt")
    write(options.output, loaded, recorded.rounds)


def write(path: Path, model: Model, rounds: list[recording.Round]) -> None:
    """Draw the most telling round, with what all of them gave in its caption."""
    shown = tree_picture.most_telling(rounds)
    mean = sum(one.emitted for one in rounds) / len(rounds)
    nodes = len(shown.tokens) - 1
    title = (
        f"one pass of the target checks {nodes} nodes and gives {shown.emitted} tokens; "
        f"{mean:.2f} a round in the whole text"
    )
    picture = tree_picture.picture(shown, lambda token: model.tokenizer.decode([token]), title)
    path.write_text(picture, encoding="utf-8")
