"""Tables in Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table ready to be written.

    Attributes
    ----------
    title, header
        Above it.
    rows
        Texts, each row as long as the header; one text is a heading over the rows that follow.
    bold
        (row, column) of the best of a group.
    notes
        Below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: tuple[str, ...] = ()


def to_markdown(tables: Sequence[Table]) -> str:
    """The tables as GitHub-flavoured Markdown."""
    return "\n\n".join(f"## {table.title}\n\n{markdown_body(table)}" for table in tables) + "\n"


def markdown_body(table: Table) -> str:
    """A table and its notes without the title."""
    lines = [_pipes(table.header), _pipes(["---"] * len(table.header))]
    for number, row in enumerate(table.rows):
        if len(row) == 1:
            lines.append(_pipes([f"*{row[0]}*", *[""] * (len(table.header) - 1)]))
            continue
        lines.append(_pipes([f"**{t}**" if (number, c) in table.bold else t for c, t in enumerate(row)]))
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])


def _pipes(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def to_latex(tables: Sequence[Table]) -> str:
    """The tables as LaTeX floats with booktabs rules."""
    parts = []
    for table in tables:
        width = len(table.header)
        lines = [
            "\\begin{table*}[t]",
            "\\centering\\footnotesize",
            f"\\begin{{tabular}}{{l{'c' * (width - 1)}}}",
            "\\toprule",
            " & ".join(f"\\textbf{{{_tex(text)}}}" for text in table.header) + " \\\\",
            "\\midrule",
        ]
        for number, row in enumerate(table.rows):
            if len(row) == 1:
                lines.append(f"\\multicolumn{{{width}}}{{c}}{{\\textit{{{_tex(row[0])}}}}} \\\\")
                continue
            cells = [f"\\textbf{{{_tex(t)}}}" if (number, c) in table.bold else _tex(t) for c, t in enumerate(row)]
            lines.append(" & ".join(cells) + " \\\\")
        caption = " ".join([f"{table.title}.", *table.notes])
        lines += ["\\bottomrule", "\\end{tabular}", f"\\caption{{{_tex(caption)}}}", "\\end{table*}"]
        parts.append("\n".join(lines))
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(parts) + "\n"


_TEX = {
    "\\": "\\textbackslash{}",
    "†": "$^\\dagger$",
    "‡": "$^\\ddagger$",
    "–": "--",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def to_html(tables: Sequence[Table]) -> str:
    """The tables as one page that needs nothing else."""
    style = (
        "body{font:15px/1.4 system-ui,sans-serif;margin:2rem;color:#1b1b1b}"
        "table{border-collapse:collapse;margin:.6rem 0}"
        "th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #dcdfe1;white-space:nowrap}"
        "th:first-child,td:first-child{text-align:left}thead th{background:#ebeef0}"
        "tr.group td{text-align:center;background:#e0e4e6;font-style:italic}tr.paper td{color:#5c5c5c}"
        "p{max-width:60rem;color:#5c5c5c}div{overflow-x:auto}"
        # On a phone a wide table scrolls in its own frame, and the method stays in view.
        "@media(max-width:600px){body{margin:1rem}h2{font-size:1.15rem}th,td{padding:.25rem .5rem}"
        "th:first-child,tr:not(.group) td:first-child{position:sticky;left:0;white-space:normal;max-width:7.5rem;"
        "min-width:6rem;background:#fff;border-right:1px solid #dcdfe1}thead th:first-child{background:#ebeef0}"
        "tr.group td{text-align:left}}"
    )
    parts = []
    for table in tables:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in table.header)
        body = []
        for number, row in enumerate(table.rows):
            if len(row) == 1:
                body.append(f'<tr class="group"><td colspan="{len(table.header)}">{html.escape(row[0])}</td></tr>')
                continue
            cells = [html.escape(text) for text in row]
            cells = [f"<b>{text}</b>" if (number, c) in table.bold else text for c, text in enumerate(cells)]
            kind = ' class="paper"' if row[0].endswith("(paper)") else ""
            body.append(f"<tr{kind}>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>")
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
        parts.append(
            f"<h2>{html.escape(table.title)}</h2><div><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>{notes}"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>StackTok report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


WRITERS = {"markdown": ("md", to_markdown), "latex": ("tex", to_latex), "html": ("html", to_html)}
"""Formats: file ending and writer."""
