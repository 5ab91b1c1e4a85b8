"""`vlmpack sample`: draw answers to a recipe's prompts, and keep them with what they earn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import Overrides, RecipePath, option, quiet_transformers, takes
from vlmpack.cli.progress import BytesBar
from vlmpack.errors import VlmpackError
from vlmpack.terminal import say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.evaluation.rollouts import Form


LogProbsName = Literal["raw", "after_temperature", "processed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOptions:
    """How answers are drawn; named as the fields of `vlmpack.Drawing`."""

    split: Annotated[Literal["train", "validation", "test"], option("sample.split")] = "train"
    max_prompts: Annotated[int | None, option("sample.max_prompts")] = None
    seed: Annotated[int, option("sample.seed")] = 0
    round: Annotated[int, option("sample.round")] = 0
    temperature: Annotated[float, option("sample.temperature")] = 1.0
    top_p: Annotated[float, option("sample.top_p")] = 1.0
    top_k: Annotated[int, option("sample.top_k")] = 0
    min_p: Annotated[float, option("sample.min_p")] = 0.0
    max_new_tokens: Annotated[int, option("sample.max_new_tokens")] = 64
    batch_size: Annotated[int, option("sample.batch_size")] = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What answers are drawn by, if not in this process."""

    server: Annotated[str | None, option("sample.server")] = None
    server_key: Annotated[str | None, option("sample.server_key")] = None
    server_log_probs: Annotated[LogProbsName | None, option("sample.server_log_probs")] = None
    concurrency: Annotated[int, option("sample.concurrency")] = 8


DEFAULT_DRAW, DEFAULT_SERVER = DrawOptions(), ServerOptions()


@takes(DrawOptions, ServerOptions)
def sample(
    recipe: RecipePath,
    out: Annotated[Path, option("sample.out")],
    overrides: Overrides = None,
    reward: Annotated[list[str] | None, option("sample.reward")] = None,
    answers: Annotated[int | None, option("sample.answers", show_default="4")] = None,
    best_of: Annotated[int | None, option("sample.best_of")] = None,
    pairs: Annotated[bool, option("sample.pairs")] = False,
    draw: DrawOptions = DEFAULT_DRAW,
    asked: ServerOptions = DEFAULT_SERVER,
) -> None:
    """Draw answers to the prompts of a recipe, and keep them with what they earn. Records are
    rollouts, conversations (--best-of) or pairs (--pairs). If it was stopped, the same command goes
    on."""
    if best_of is not None and (pairs or answers is not None):
        raise VlmpackError(
            "--best-of N says how many answers there are, and what is written; "
            "expected neither --answers nor --pairs beside it"
        )
    form: Form = "pairs" if pairs else "rollouts" if best_of is None else "best"
    from vlmpack.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())  # its problems show without torch
    quiet_transformers()
    from vlmpack.api import sample as draw_answers
    from vlmpack.run.sample import Drawing

    server = None
    if asked.server is not None:
        from vlmpack.run.servers import Server

        server = Server(
            url=asked.server,
            key_variable=asked.server_key,
            log_probs=asked.server_log_probs,
            concurrency=asked.concurrency,
        )
    drawing = Drawing(answers=best_of or answers or 4, form=form, **asdict(draw))
    ACTIVITY.enter_alone("opening model and data")
    with BytesBar("drawing answers", draw.max_prompts) as bar:
        result = draw_answers(
            loaded,
            out,
            rewards=reward or (),
            drawing=drawing,
            server=server,
            on_prompts=lambda count: bar.advance(units=count),
        )
    equal = f"; all earned the same at {counted(result.equal, 'prompt')}" if result.equal else ""
    cut = f"; {counted(result.cut, 'answer')} cut at --max-new-tokens" if result.cut else ""
    say(
        f"{counted(result.answers, 'answer')} to {counted(result.prompts, 'prompt')}, mean reward "
        f"{result.reward:.3f}{equal}{cut}"
    )
    say(f"{counted(result.records, 'record')}: {result.file}")
