"""``edgefl personalize``: what a run's model is worth to each of its users, before and after a few steps."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.options import existing, run_folder, writable_file
from edgefl.cli.output import console, print_json, print_table
from edgefl.system.files import write_text
from edgefl.wire.text import metric_value

if TYPE_CHECKING:
    from edgefl.analysis.personal.report import PersonalReport

Protocol = StrEnum("Protocol", ["train_support", "split_test", "paper_literal"])
_WORST = 10


def personalize(
    folder: Annotated[
        Path,
        typer.Argument(callback=run_folder, metavar="RUN", help="folder of a finished run or simulation"),
    ],
    protocol: Annotated[
        list[Protocol] | None,
        typer.Option(help="what is adapted to and what judges; may be repeated. Default: all three"),
    ] = None,
    steps: Annotated[str, typer.Option(help="numbers of steps of the curve")] = "0,1,2,5,10",
    headline: Annotated[int, typer.Option(min=0, help="the number of steps of the headline")] = 1,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="size of a step; default: the algorithm's own")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="decides splits, batches and noise")] = 0,
    data: Annotated[
        Path | None, typer.Option(callback=existing, help="folder with the dataset's standard files")
    ] = None,
    html: Annotated[Path | None, typer.Option(callback=writable_file, help="a page with charts")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object with every user")] = False,
) -> None:
    """Adapt the model of a run to each device's data.

    The metric of the task is reported before and after, over all users: accuracy, perplexity, the mean absolute error, or
    the loss. The run may be a simulation.

    Each user has its training samples and a test shard of the same class proportions. Three protocols say what is adapted to
    and what judges: train_support (training samples, test shard), split_test (halves of the test shard, a user who is new)
    and paper_literal (the test shard as both, which leaks). All runs get the same batches with the same seed, so they can be
    compared. The level of a constant answer, each user's own most frequent class, is printed beside.

    Examples:

      edgefl personalize runs/first

      edgefl personalize runs/first --alpha 0.03 --steps 0,1,2,5,10 --protocol train_support --html report.html

      edgefl personalize runs/first --json
    """

    counts = numbers(steps)  # torch, which all that follows loads, takes seconds
    from edgefl.analysis.personal.report import page
    from edgefl.api.analysis import personalize as personalized

    found = personalized(
        folder,
        protocols=[each.value for each in protocol or Protocol],
        steps=counts,
        headline=headline,
        alpha=alpha,
        batch=batch,
        seed=seed,
        data=data,
    )
    made, title = list(found.reports), found.title
    if html is not None:
        write_text(html, page(title, made))
    if as_json:
        print_json(
            {
                "run": str(folder),
                "model": found.model,
                "algorithm": found.algorithm,
                "data": found.data,
                "reports": made,
            }
        )
    else:
        _show(title, made, html)


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a text such as ``0,1,5``.

    Raises:
        ConfigError: if the text has another form.
    """
    from edgefl.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--steps is a list of whole numbers such as 0,1,5, found {text!r}", steps=text
        ) from error


def _curve(metric: str, made: list[PersonalReport]) -> list[dict[str, object]]:
    """Return a table row for each number of steps, with the value of ``metric`` in a column for each report's protocol."""
    return [
        {"steps": point.steps}
        | {report.protocol: metric_value(metric, report.curve[place].value(metric), 2) for report in made}
        for place, point in enumerate(made[0].curve)
    ]


def _show(title: str, made: list[PersonalReport], html: Path | None) -> None:
    from edgefl.analysis.personal.report import summary, user_rows
    from edgefl.wire.metrics import LOSS

    first = made[0]
    caption = f"{len(first.users)} users, steps of {first.alpha:g}, batches of {first.batch}"
    print_table(title, summary(made), caption)
    for report in made:
        console.print(f"{report.protocol}: {report.note}")
    for metric in (*first.curve[0].metrics, LOSS):
        print_table(f"Mean {metric} over users", _curve(metric, made))
    rows = user_rows(first)
    print_table(
        f"Users, {first.protocol}",
        rows[:_WORST],
        f"the {_WORST} that fare worst of {len(rows)}; --json has them all" if len(rows) > _WORST else "",
    )
    for name, why in first.left_out.items():
        console.print(f"left out: {name}: {why}")
    if html is not None:
        console.print(f"{html}")
