"""``stacktok eval`` and ``stacktok report``: run a plan of cells, and print the tables of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import check_file, progress_bar, stderr, user_errors


def evaluate(
    plan: Annotated[str, typer.Argument(help="A plan's file, or the name of a shipped plan; `list` shows those.")],
    out: Annotated[Path, typer.Option(help="Folder under which the plan's folder is made.")] = Path("results"),
    engine: Annotated[str | None, typer.Option(help="lmms-eval, or loop for the scenes without it.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items per task.")] = None,
    scenes: Annotated[int | None, typer.Option(help="Scenes that tasks on scenes ask about.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A file of `stacktok tune`: run it in place of the methods.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")] = None,
    processes: Annotated[int, typer.Option(help="Data-parallel processes inside a cell (torchrun).")] = 1,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster over which cells are spread.")] = None,
    gpus: Annotated[float, typer.Option(help="GPUs that a cell takes on Ray.")] = 0,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on when a cell fails.")] = False,
) -> None:
    """Run the cells of a plan that have no result yet."""
    with user_errors():
        from stacktok.evaluation.plan import load_plan, shipped_plans
        from stacktok.evaluation.run import one_run, run_plan

        if plan == "list":
            for name, text in shipped_plans().items():
                print(f"{name}: {text}")
            return
        given: dict[str, Any] = {"engine": engine, "limit": limit, "scenes": scenes}
        if settings is not None:
            given["methods"] = [_method_part(settings)]
        loaded = load_plan(plan, {name: value for name, value in given.items() if value is not None})
        with one_run(out / loaded.name), progress_bar(stderr()) as show:
            results = run_plan(
                loaded,
                out,
                device=device,
                processes=processes,
                ray=ray,
                gpus=gpus,
                keep_going=keep_going,
                report=lambda progress, text: show(progress.share, f"[{progress}] {text}"),
            )
    print(results.folder)


def _method_part(path: Path) -> dict[str, Any]:
    """A settings file as the one method of a plan."""
    from stacktok.methods.settings import load, method_name, own_parameters

    chosen = load(path)
    budget = chosen.budget if isinstance(chosen.budget, (int, float, str)) else str(chosen.budget)
    part = {"name": path.stem, "method": method_name(chosen), "settings": own_parameters(chosen), "budgets": [budget]}
    return part | ({} if chosen.positions is None else {"positions": [chosen.positions]})


def report(
    results: Annotated[list[Path], typer.Argument(help="Folders that `stacktok eval` wrote.")],
    form: Annotated[str, typer.Option("--format", help="markdown, latex or html.")] = "markdown",
    baseline: Annotated[str | None, typer.Option(help="Method against which the others are tested.")] = None,
    dev: Annotated[
        Path | None, typer.Option(help="Results on other items, on which fixed scalarization's alpha is chosen.")
    ] = None,
    no_paper: Annotated[bool, typer.Option("--no-paper", help="Leave the published numbers out.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; standard output if not given.")] = None,
    into: Annotated[
        list[Path] | None, typer.Option(help="Document whose marked tables are made again, in place of a report.")
    ] = None,
) -> None:
    """Print the paper's tables from results, with intervals and paired tests."""
    with user_errors():
        if form not in ("markdown", "latex", "html"):
            raise ValueError(f"format {form!r} is not known; use one of markdown, latex, html")
        if out is not None:
            check_file(out)

        from stacktok.evaluation.cells import find_results
        from stacktok.evaluation.formats import WRITERS
        from stacktok.evaluation.report import build_report
        from stacktok.evaluation.tables import read_study

        shown = [found for folder in results for found in find_results(folder)]
        judges = [] if dev is None else find_results(dev)
        for found in judges:
            if any(found.folder.samefile(own.folder) for own in shown):
                raise ValueError(f"dev {found.folder} is among the results; give results on other items")
        studies, others = ([read_study(found) for found in group] for group in (shown, judges))
        if into:
            from stacktok.evaluation.pages import fill

            # All are made before any is written.
            filled = {path: fill(path.read_text(encoding="utf-8"), studies) for path in into}
            for path, text in filled.items():
                path.write_text(text, encoding="utf-8")
            return
        text = WRITERS[form][1](build_report(studies, baseline, paper=not no_paper, dev=others))
        if out is not None:
            out.write_text(text, encoding="utf-8")
    if out is None:
        print(text, end="")
