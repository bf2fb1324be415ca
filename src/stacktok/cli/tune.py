"""``stacktok tune``: the cheapest setting that keeps a user's quality, measured on their own data and machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stacktok.cli.common import (
    DEFAULT_MODEL,
    MODEL_HELP,
    SET_HELP,
    check_dtype,
    check_folder,
    load,
    model_path,
    parse_settings,
    stderr,
    stdout,
    user_errors,
)
from stacktok.core.budget import parse_budget

if TYPE_CHECKING:
    from stacktok.tune.run import Found, Search

METHODS = "stacktok,mmtok,divprune,cdpruner,visionzip,uniform"
BUDGETS = "50%,33%,20%,10%,5%"


def tune(
    data: Annotated[
        str, typer.Option(help="Folder with pictures and a csv or jsonl, such a file, parquet, or an lmms-eval task.")
    ],
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    out: Annotated[Path, typer.Option(help="Folder for stacktok.yaml, pictures and the journal.")] = Path("tuned"),
    keep: Annotated[float, typer.Option(help="Share of the full model's quality that must be kept.")] = 0.98,
    metric: Annotated[
        str | None, typer.Option(help="accuracy, anls, relaxed or file.py:function, for data with answers.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Names separated by commas (see `methods`), or all.")] = METHODS,
    budgets: Annotated[str, typer.Option(help="Budgets separated by commas.")] = BUDGETS,
    positions: Annotated[str, typer.Option(help="Position policies: default, or compact,kept.")] = "default",
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples, from the start.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the split into search and held-out pictures.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the cheapest setting that keeps the quality of your model on your pictures."""
    with user_errors():
        kept = [parse_budget(text) for text in budgets.split(",")]
        places = [_positions(text.strip()) for text in positions.split(",")]
        own, path = parse_settings(settings), model_path(model)
        check_dtype(dtype)
        check_folder(out)
        import matplotlib  # noqa: F401  (needed after all is measured)

        from stacktok.evaluation.cells import fingerprint
        from stacktok.methods.settings import KEPT, build_methods
        from stacktok.tune.data import read_samples
        from stacktok.tune.engine import Engine, settings_of
        from stacktok.tune.quality import metric_of
        from stacktok.tune.run import Search

        names = None if methods.strip().lower() == "all" else [name.strip() for name in methods.split(",")]
        chosen = build_methods(names, own, KEPT)
        samples = read_samples(data, limit)
        labelled = bool(samples[0].answers)
        if metric is not None and not labelled:
            raise ValueError(f"metric {metric!r} needs right answers, and data has none; leave it out, or add a column")
        quality = (metric or "accuracy") if labelled else "unchanged answers"
        score = metric_of(metric or "accuracy") if labelled else None
        loaded, processor = load(path, dtype, device, quiet=as_json)
        engine = Engine(loaded, processor, score, max_new_tokens)
        wanted, refused = _accepted(engine, settings_of(list(chosen.values()), kept, places), samples[0])
        console = stderr()
        identity: dict[str, Any] = {
            "checkpoint": fingerprint(path),
            "model": path if fingerprint(path) is None else "",
            "metric": quality,
        }
        identity |= {"max_new_tokens": max_new_tokens, "dtype": str(loaded.dtype)}
        with console.status("searching") as status:

            def report(text: str) -> None:
                # A terminal shows one line that changes, a log every line.
                status.update(text) if console.is_terminal else console.print(text, markup=False, highlight=False)

            search = Search(
                engine, samples, wanted, out, identity, keep=keep, quality=quality, seed=seed, report=report
            )
            for line in refused:
                console.print(line, markup=False, highlight=False)
            with _writable(out):
                found = search.run()
                written = _write(search, found, out, model or DEFAULT_MODEL)
    if as_json:
        print((out / "tune.json").read_text(encoding="utf-8"))
    else:
        _print(search, found, written)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Say what to do where files cannot be written any more; all that was measured is in the journal."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ValueError(
            f"{out} cannot be written any more ({os.strerror(error.errno)}); what was measured is kept there: mend "
            "that and start the same command again"
        ) from None


def _positions(text: str) -> Any:
    if text not in ("default", "compact", "kept"):
        raise ValueError(f"positions {text!r} is not known; use default, compact or kept")
    return None if text == "default" else text


def _accepted(engine: Any, settings: list[Any], sample: Any) -> tuple[list[Any], list[str]]:
    """Settings that the model takes, tried on one sample per method, and why the others are left out."""
    verdict: dict[str, str | None] = {}
    full = engine.full([sample])
    for setting in settings:
        name = setting.method.info.name
        if name not in verdict:
            try:
                engine.measure([setting], [sample], full)
                verdict[name] = None
            except ValueError as error:
                verdict[name] = str(error)
    taken = [setting for setting in settings if verdict[setting.method.info.name] is None]
    if not taken:
        raise ValueError(f"no method can run on this model; the first says: {next(iter(verdict.values()))}")
    return taken, [f"{name} is left out: {reason}" for name, reason in verdict.items() if reason is not None]


def _write(search: Search, found: Found, out: Path, model: str) -> list[Path]:
    """The settings file, the Pareto picture and the page of the worst changes."""
    from stacktok.figures.files import save
    from stacktok.figures.tune import Point, pareto_figure
    from stacktok.methods.settings import settings_text
    from stacktok.tune.page import drawn, page, worst_changes

    name = Path(model).name if Path(model).is_dir() else model
    points = [
        Point(
            str(row.setting),
            found.seconds[row.setting.key],
            row.kept.estimate,
            row.kept.low if row.kept.known else row.kept.estimate,
            row.kept.high if row.kept.known else row.kept.estimate,
            row is found.best,
        )
        for row in found.rows
    ]
    written = [out / "pareto.png", out / "changes.html"]
    save(pareto_figure(points, found.seconds["full"], search.keep, found.quality), written[0], dpi=150)
    shown = found.best or max(found.rows, key=lambda row: row.kept.estimate)
    held_out = [search.samples[n] for n in found.held_out]
    changes = worst_changes(
        search.engine, shown.setting, held_out, found.columns["full"], found.columns[shown.setting.key]
    )
    pictures = [
        (one, drawn(search.engine.model, search.engine.processor, shown.setting, one.sample)) for one in changes
    ]
    changed = sum(not same for same in found.columns[shown.setting.key]["unchanged"])
    lines = [
        f"{changed} of {len(held_out)} answers changed on held-out samples; shown are the {len(changes)} whose old "
        "answer has become the least probable.",
        f"{found.quality} kept: {_percent(shown.kept)} %; end to end {found.speed_up(shown.setting.key):.2f}x.",
    ]
    title = f"{shown.setting} on {name}" + ("" if found.best else " (not sure to keep what is promised)")
    written[1].write_text(page(title, lines, pictures), encoding="utf-8")
    settings_file = out / "stacktok.yaml"
    if found.best is None:
        settings_file.unlink(missing_ok=True)
        return written
    measured = {
        "quality": found.quality,
        "kept": round(found.best.kept.estimate, 4),
        "kept_at_least": round(found.best.at_least, 4),
        "promised": search.keep,
        "held_out_samples": len(held_out),
        "tokens_per_layer": round(found.best.cost, 1),
        "speed_up": round(found.speed_up(found.best.setting.key), 2),
    }
    settings_file.write_text(settings_text(found.best.setting.method, model=name, measured=measured), encoding="utf-8")
    return [settings_file, *written]


def _percent(interval: Any) -> str:
    """An estimate in percent, with its interval where it is known."""
    if not interval.known:
        return f"{100 * interval.estimate:.1f}"
    return f"{100 * interval.estimate:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _print(search: Search, found: Found, written: list[Path]) -> None:
    from rich.table import Table

    console = stdout()
    table = Table(
        "setting", "kept, % [95 %]", "at least", "log-prob", "tokens", "speed-up", "", box=None, padding=(0, 2, 0, 0)
    )
    for row in found.rows:
        note = "recommended" if row is found.best else "" if row.passed else "misses" if row.tested else "not tested"
        speed = f"{found.speed_up(row.setting.key):.2f}x"
        sure = f"{100 * row.at_least:.1f}"
        cells = (_percent(row.kept), sure, f"{row.log_prob.estimate:.3f}", f"{row.cost:.0f}", speed, note)
        table.add_row(str(row.setting), *cells)
    console.print(
        f"{found.quality} of the full model on {len(found.held_out)} held-out samples: {_percent(found.full)} %",
        highlight=False,
    )
    console.print(table)
    if found.best is None:
        console.print(f"No setting keeps {100 * search.keep:g} % for sure; give more samples, or a smaller --keep.")
    else:
        console.print(
            f"Recommended: {found.best.setting}, {found.speed_up(found.best.setting.key):.2f}x end to end, keeps at "
            f"least {100 * found.best.at_least:.1f} %.",
            highlight=False,
        )
    for path in written:
        print(path)
