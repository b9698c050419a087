"""The tables of an evaluation as rows of text, for the terminal, Markdown and HTML alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable


@dataclass
class Table:
    """A title, a line about it, column heads and rows of text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    about: str = ""

    def markdown(self) -> str:
        """As GitHub's Markdown."""
        lines = [f"### {self.title}", ""]
        if self.about:
            lines += [self.about, ""]
        lines.append("| " + " | ".join(self.head) + " |")
        lines.append("|" + "|".join(["---"] + ["---:"] * (len(self.head) - 1)) + "|")
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def rich(self) -> RichTable:
        """For the terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*row)
        return table


def estimate(value: dict[str, float], digits: int = 1, sign: bool = False) -> str:
    """`31.2 (27.0…35.1)`."""
    plus = "+" if sign else ""
    return f"{value['value']:{plus}.{digits}f} ({value['low']:{plus}.{digits}f}…{value['high']:{plus}.{digits}f})"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def set_table(name: str, entry: dict[str, Any]) -> Table:
    """One set under every layout."""
    metrics = entry["metrics"]
    kl = next((key for key in ("choice_kl", "answer_loss") if key in entry["layouts"]["attention"]), None)
    nats = [] if kl is None else [kl.replace("_", " ")]
    head = ["layout", *metrics, "agreement", *nats, "vs base", "blocks", "budget", "GFLOPs/token", "FLOPs saved"]
    rows = []
    for layout, figures in entry["layouts"].items():
        note = "" if figures["items"] == entry["items"] else f" ({figures['items']} items)"
        rows.append(
            [
                layout + note,
                *(estimate(figures["metrics"][metric]) for metric in metrics),
                estimate(figures["agreement"]),
                *([] if kl is None else [f"{figures[kl]['value']:.4f}" if kl in figures else "–"]),
                estimate(figures["vs_base"], sign=True),
                f"{figures['attention_blocks']:.1f}",
                "–" if figures["budget"] is None else f"{figures['budget']:.3f}",
                f"{1000 * figures['tflops_per_token']:.3f}",
                _percent(figures["flops_saved"]),
            ]
        )
    tokens = entry["prompt_tokens"]
    about = (
        f"{entry['items']} items, prompts of {tokens['min']}–{tokens['max']} tokens (mean {tokens['mean']:g}), answers "
        f"of {entry['answer_tokens']:g}; `vs base` is the paired difference in {entry['primary']}"
    )
    alone = entry["all_attention_at_every_budget"]
    if alone:
        about += f"; {alone} items are all attention at every budget"
    if entry["left_out"]:
        about += f"; {entry['left_out']} items do not fit the context and are left out"
    if entry["discriminates"] is False:
        about += "; base − all-ssm is below 2 points, so comparisons here are judged by agreement"
    return Table(name, head, rows, about + ".")


def score_table(summary: dict[str, Any]) -> Table:
    """One figure per layout: the mean over the sets."""
    rows = [[layout, estimate(value)] for layout, value in summary["scores"].items()]
    return Table(
        "Score", ["layout", "mean of the primary metrics"], rows, "Mean over the sets of each one's primary metric."
    )


def base_table(summary: dict[str, Any]) -> Table | None:
    """Every `auto` against the base, set by set."""
    rows = []
    for layout, entry in summary["not_inferior"].items():
        for name, row in entry["sets"].items():
            rows.append(
                [
                    f"{layout} on {name}",
                    row["judged_by"],
                    row["against"],
                    estimate(row["difference"], sign=True),
                    "yes" if row["not_inferior"] else "no",
                ]
            )
    if not rows:
        return None
    about = (
        "Not inferior: the paired 95 % lower bound against all attention is at least −1 point; where a set does not "
        "discriminate: significantly closer to the base's answers than all-ssm is. Requests that have a choice only."
    )
    return Table("Against the base", ["layout", "judged by", "against", "difference", "not inferior"], rows, about)


def pair_table(title: str, pairs: list[dict[str, Any]], other: str) -> Table | None:
    """The gates against a baseline at equal realised cost."""
    if not pairs:
        return None
    rows = [
        [
            f"{pair['set']} at {pair['budget']:g}",
            pair["judged_by"],
            " / ".join("–" if b is None else f"{b:.3f}" for b in pair["realised"]),
            estimate(pair["difference"], sign=True),
            ("yes" if pair["at_least_as_good"] else "no") + (" *" if pair["significant"] else ""),
        ]
        for pair in pairs
    ]
    good = sum(pair["at_least_as_good"] for pair in pairs)
    about = f"At least as good in {good} of {len(pairs)}; * marks a paired 95 % interval that leaves out 0."
    return Table(
        title, ["set and budget", "judged by", f"realised, auto / {other}", "difference", "auto ≥"], rows, about
    )


def saved_table(summary: dict[str, Any]) -> Table | None:
    """FLOPs that each `auto` saves, at the set's own lengths and at fixed ones."""
    lengths: list[str] = []
    rows = []
    for name, entry in summary["sets"].items():
        for layout, figures in entry["layouts"].items():
            if not layout.startswith("auto"):
                continue
            at = figures.get("flops_saved_at", {})
            lengths = lengths or list(at)
            cells = [_percent(at.get(n)) for n in lengths]
            rows.append(
                [
                    f"{name} {layout}",
                    f"{1000 * figures['tflops_per_token']:.3f}",
                    _percent(figures["flops_saved"]),
                    *cells,
                ]
            )
    if not rows:
        return None
    about = (
        "Operations per token saved against all attention: at the set's own lengths, and with the layouts of the "
        "requests that have a choice at fixed total lengths."
    )
    head = ["set and layout", "GFLOPs/token", "saved, own lengths", *(f"at {n}" for n in lengths)]
    return Table("FLOPs saved", head, [row + ["–"] * (len(head) - len(row)) for row in rows], about)


def flops_table(summary: dict[str, Any]) -> Table:
    """Operations per token of the two mixers by length and part."""
    rows = []
    for layout, lengths in summary["flops"].items():
        for n, parts in lengths.items():
            for phase, row in parts.items():
                rows.append(
                    [
                        f"{layout}, {phase.replace('_', ', ')}, {n}",
                        *(f"{row[p]:.4f}" for p in ("mixer", "mlp", "head", "total")),
                    ]
                )
    about = "10⁹ operations per token; prefill per prompt token with the head once, in chunk form unless said."
    return Table("Operations by part", ["layout, phase, length", "mixer", "MLP", "head", "total"], rows, about)


def layouts_table(summary: dict[str, Any]) -> Table | None:
    """How many layouts the gates used."""
    rows = []
    for name, entry in summary["sets"].items():
        for layout, figures in entry["layouts"].items():
            if layout.startswith("auto"):
                found = figures["layouts"]
                rows.append(
                    [
                        f"{name} {layout}",
                        str(figures["items"]),
                        str(found["distinct"]),
                        _percent(found["top6_share"]),
                        f"{figures['attention_blocks']:.1f}",
                    ]
                )
    if not rows:
        return None
    head = ["set and layout", "requests", "distinct layouts", "commonest six", "attention blocks"]
    return Table("Layouts that the gates chose", head, rows)


def oracle_table(summary: dict[str, Any]) -> Table | None:
    """What knowing the result per request would give."""
    rows = []
    for name, entry in summary["sets"].items():
        for layout, row in entry.get("oracle", {}).items():
            if layout.startswith("auto"):
                rows.append(
                    [f"{name} {layout}", str(entry["oracle"]["items"]), f"{row['auto']:.1f}", f"{row['oracle']:.1f}"]
                )
    if not rows:
        return None
    about = (
        "The oracle picks each request's number of attention blocks in the static chain, knowing its result, at equal "
        "cost."
    )
    return Table("Oracle over counts", ["set and layout", "items", "auto", "oracle"], rows, about)


def all_tables(summary: dict[str, Any]) -> list[Table]:
    """Every table that there are figures for: comparisons first, then set by set."""
    found = [
        score_table(summary),
        base_table(summary),
        pair_table("Against static layouts at equal cost", summary["auto_vs_static"], "static"),
        pair_table("Against shuffled layouts", summary["auto_vs_shuffled"], "shuffled"),
        saved_table(summary),
        layouts_table(summary),
        oracle_table(summary),
        *(set_table(name, entry) for name, entry in summary["sets"].items()),
        flops_table(summary),
    ]
    return [table for table in found if table is not None]


def markdown(summary: dict[str, Any], plots: dict[str, str] | None = None) -> str:
    """The whole evaluation as Markdown.

    Args:
        plots: title -> file name of the image beside the page.
    """
    about = summary["about"]
    name = about["model"] + (f"@{about['revision']}" if about.get("revision") else "")
    lines = [f"# Evaluation of {name}", ""]
    lines.append(
        f"Suite `{about['suite']}`, {about['dtype']} on {about['device']}, data: {about['data']}, seed {about['seed']}."
    )
    lines += ["", *(f"- *{key}*: {text}" for key, text in summary["notes"].items()), ""]
    for title, file in (plots or {}).items():
        lines += [f"### {title}", "", f"![{title}]({file})", ""]
    return "\n".join(lines) + "\n" + "\n".join(table.markdown() for table in all_tables(summary))
