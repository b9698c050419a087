"""One self-contained HTML page from result files: claims, the paper's beside them, tables, plots, how to reproduce."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from morph.errors import CorruptFile, InvalidRequest, UnsupportedModel
from morph.evaluate.claims import Claim, claims_in, read_results
from morph.evaluate.command import RESULTS
from morph.evaluate.plots import draw_all
from morph.evaluate.summary import SUMMARY_VERSION
from morph.evaluate.tables import Table, all_tables

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 0.6rem 0 1.2rem; font-size: 0.86rem; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
.wide { overflow-x: auto; } .about { color: #555; font-size: 0.9rem; margin: 0.2rem 0; }
.met { color: #1c6b33; } .unmet { color: #a02020; font-weight: 600; }
pre { background: #f5f5f5; padding: 0.6rem; overflow-x: auto; font-size: 0.85rem; }
svg { max-width: 100%; height: auto; } nav a { margin-right: 1rem; }
@media (prefers-color-scheme: dark) {
 body { background: #16181b; color: #ddd; } th, td { border-color: #333; } .about { color: #aaa; }
 pre { background: #222; } .met { color: #6fcf8b; } .unmet { color: #ff8a80; } a { color: #8ab4f8; }
 svg { background: #fff; } h2 { border-color: #444; }
}
"""


def escape(text: object) -> str:
    """Text for HTML."""
    return html.escape(str(text))


def html_table(table: Table, heading: str = "h3") -> str:
    """A table with its title."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    about = f"<p class='about'>{escape(table.about.replace('`', ''))}</p>" if table.about else ""
    return (
        f"<{heading}>{escape(table.title)}</{heading}>{about}<div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def published() -> dict[str, Any]:
    """What the paper and others state; `data/published.json`."""
    text = resources.files("morph.evaluate").joinpath("data", "published.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The summary in a folder of `morph eval`.

    Raises:
        InvalidRequest: no results there. CorruptFile: not readable.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise InvalidRequest(
            f"--eval {folder} has no {RESULTS}: the run is not finished; run `morph eval … --out {folder}` to its end"
        )
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = found.get("version")
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{path} is not readable ({error!r}); run `morph eval` again with the same --out") from error
    if version != SUMMARY_VERSION:
        raise UnsupportedModel(
            f"{path} has version {version!r}, this Morph reads {SUMMARY_VERSION}; run `morph eval` again with the same "
            "--out: finished items are kept"
        )
    return found


def _claims_section(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for file, content in results.items():
        for claim in claims_in(content):
            verdict = "<span class='met'>met</span>" if claim.met else "<span class='unmet'>not met</span>"
            rows.append(
                f"<tr><td>{escape(claim.id)}</td><td>{claim.value:.4g}</td><td>{escape(claim.goal)}</td>"
                f"<td>{verdict}</td><td class='text'>{escape(file)}</td></tr>"
            )
    if not rows:
        return "<p>No result file makes a claim yet.</p>"
    head = "<tr><th>claim</th><th>value</th><th>goal</th><th></th><th>from</th></tr>"
    return f"<div class='wide'><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"


def _paper_section(claims: Sequence[Claim]) -> str:
    paper = published()["paper"]
    rows = []
    for entry in paper["claims"]:
        ours = [c for c in claims if any(fnmatchcase(c.id, pattern) for pattern in entry["ours"])]
        text = "<br>".join(
            f"{escape(c.id)} = {c.value:.4g} <span class='{'met' if c.met else 'unmet'}'>({escape(c.goal)})</span>"
            for c in ours
        )
        rows.append(
            f"<tr><td class='text'>{escape(entry['claim'])}</td><td class='text'>{escape(entry['value'])}</td>"
            f"<td class='text'>{text or 'not measured yet'}</td></tr>"
        )
    head = "<tr><th>claim</th><th>the paper</th><th>here</th></tr>"
    return (
        f"<p class='about'>{escape(paper['note'])}</p><div class='wide'><table><thead>{head}</thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def base_figures(summary: dict[str, Any]) -> Table | None:
    """The base beside public figures, for the sets that have one."""
    rows = []
    for figure in published()["base"]["figures"]:
        entry = summary["sets"].get(figure["set"])
        if entry is None or not str(summary["about"]["model"]).startswith(figure["model"]):
            continue
        ours = entry["layouts"]["attention"]["metrics"][figure["metric"]]
        rows.append(
            [
                f"{figure['set']} {figure['metric']}",
                f"{ours['value']:.1f} ({ours['low']:.1f}…{ours['high']:.1f}), {entry['items']} items",
                f"{figure['value']:.2f}",
                figure["setup"],
                figure["source"],
            ]
        )
    if not rows:
        return None
    return Table(
        "The base beside public figures",
        ["set", "here", "public", "setup", "source"],
        rows,
        published()["base"]["note"],
    )


def _evaluation_section(name: str, summary: dict[str, Any]) -> str:
    about = summary["about"]
    facts = ", ".join(
        f"{key} {escape(about[key])}" for key in ("suite", "dtype", "device", "data", "seed") if key in about
    )
    parts = [f"<h2 id='{escape(name)}'>Evaluation: {escape(name)}</h2><p class='about'>{facts}</p><ul class='about'>"]
    parts += [f"<li><em>{escape(key)}</em>: {escape(text)}</li>" for key, text in summary["notes"].items()]
    parts.append("</ul>")
    public = base_figures(summary)
    if public is not None:
        parts.append(html_table(public))
    for title, svg in draw_all(summary).values():
        parts.append(f"<h3>{escape(title)}</h3><figure>{svg}</figure>")
    parts += [html_table(table) for table in all_tables(summary)]
    return "".join(parts)


def _files_section(results: dict[str, dict[str, Any]]) -> str:
    parts = []
    for file, content in results.items():
        machine, versions = content.get("machine", {}), content.get("versions", {})
        where = ", ".join(f"{key} {value}" for key, value in machine.items() if not isinstance(value, dict))
        what = ", ".join(f"{key} {value}" for key, value in versions.items())
        about = content.get("about", {})
        notes = about.items() if isinstance(about, dict) else []
        lines = "".join(
            f"<li><em>{escape(k)}</em>: {escape(v)}</li>" for k, v in notes if isinstance(v, str | int | float)
        )
        parts.append(
            f"<h3>{escape(file)}</h3>"
            f"<p class='about'>{escape(content.get('date', ''))} · {escape(where)} · {escape(what)}"
            f"</p><ul class='about'>{lines}</ul><pre>{escape(content.get('command', 'no command recorded'))}</pre>"
        )
    return "".join(parts) or "<p>No result files.</p>"


REPRODUCE = """
<ol>
<li>Install with <code>pip install 'morph-hybrid[eval]'</code>, and fetch the model with <code>morph pull</code>.</li>
<li><code>morph eval smollm2-135m</code> runs the quick suite on samples in the package, without data or network.</li>
<li><code>morph eval smollm2-135m --suite six --data DATA --out OUT</code> runs all sets from local files,
<code>--hub</code> downloads them. A stopped run goes on with the same command.</li>
<li><code>lm_eval --model morph --tasks …</code> runs the same questions through lm-eval; see docs/evaluation.md.</li>
<li>Each result file below names the command that made it.</li>
</ol>
"""


def build_report(results_folder: Path | None, evaluations: Sequence[Path]) -> str:
    """The page as text.

    Args:
        results_folder: with `*.json` of benchmarks; None = none. evaluations: folders of `morph eval`.

    Raises:
        InvalidRequest: there is nothing to report. CorruptFile: names the file.
    """
    results = read_results(results_folder) if results_folder is not None else {}
    summaries: dict[str, dict[str, Any]] = {}
    for folder in evaluations:
        summaries[folder.resolve().name] = read_evaluation(folder)
    for file, content in results.items():
        summary = content.get("summary")
        if isinstance(summary, dict) and summary.get("version") == SUMMARY_VERSION:
            summaries[file.removesuffix(".json")] = summary
    if not results and not summaries:
        raise InvalidRequest(
            f"nothing to report: no *.json in {results_folder} and no --eval folder; run `morph eval` or a benchmark"
        )
    claims = [claim for content in results.values() for claim in claims_in(content)]
    met = sum(claim.met for claim in claims)
    links = "".join(f"<a href='#{escape(name)}'>{escape(name)}</a>" for name in summaries)
    sections = "".join(_evaluation_section(name, summary) for name, summary in summaries.items())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Morph: measured</title><style>{STYLE}</style></head><body>"
        f"<h1>Morph: measured</h1><p>{met} of {len(claims)} claims are met; those that are not are listed too.</p>"
        f"<nav><a href='#claims'>Claims</a><a href='#paper'>The paper</a>{links}<a href='#files'>Result files</a>"
        "<a href='#reproduce'>How to reproduce</a></nav>"
        f"<h2 id='claims'>Claims</h2>{_claims_section(results)}"
        f"<h2 id='paper'>Beside the paper</h2>{_paper_section(claims)}"
        f"{sections}"
        f"<h2 id='files'>Result files</h2>{_files_section(results)}"
        f"<h2 id='reproduce'>How to reproduce</h2>{REPRODUCE}</body></html>\n"
    )
