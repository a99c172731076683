"""The report's figures, as SVG text to stand inside a page.

Colours are names that the page's style sheet defines, so one figure serves light and dark: matplotlib draws
with stand-in colours, which are replaced in its output.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAND_INS = {
    "#010101": "var(--ink)",
    "#010102": "var(--quiet)",
    "#010103": "var(--rule)",
    "#010104": "var(--accent)",
    "#010105": "var(--second)",
    "#010106": "var(--bar)",
}
_INK, _QUIET, _RULE, _ACCENT, _SECOND, _BAR = _STAND_INS

_STYLE: Any = {  # a dict; matplotlib asks for a type of its own keys
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "twofold",  # the same figures give the same file
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _QUIET,
    "axes.edgecolor": _RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _QUIET,
    "ytick.labelcolor": _QUIET,
}


@contextmanager
def _figure(width: float, height: float, out: list[str], label: str) -> Iterator[Axes]:
    import matplotlib  # here: who measures or chats draws nothing, and need not wait for it
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.add_subplot()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for stand_in, colour in _STAND_INS.items():
        svg = svg.replace(stand_in, colour)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px inherit; font-family: inherit", svg)
    out.append(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def ledger_svg(ledger: Sequence[dict[str, Any]]) -> str:
    """Bars of the speed-up, one for each step of the line, the last one stressed."""
    out: list[str] = []
    with _figure(8.8, 0.55 + 0.48 * len(ledger), out, "speed-up after each step") as axes:
        speedups = [row["speedup"] for row in ledger]
        colours = [_BAR] * (len(ledger) - 1) + [_ACCENT]
        axes.barh(range(len(ledger)), speedups, color=colours, height=0.62)
        for row, speedup in enumerate(speedups):
            text = f"{speedup:.2f}x, {ledger[row]['ms_per_token']:.3g} ms a token"
            axes.text(speedup + max(speedups) * 0.012, row, text, va="center")
        axes.set_yticks(range(len(ledger)), [row["name"] for row in ledger])
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        axes.invert_yaxis()
        axes.set_xlim(0, max(speedups) * 1.28)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
    return out[0]


def curve_svg(curve: Sequence[dict[str, float]]) -> str:
    """Validation KL over the steps of distillation; the dashed line is where it began, plain rounding."""
    out: list[str] = []
    with _figure(8.8, 2.9, out, "validation KL during distillation") as axes:
        steps, kl = [point["step"] for point in curve], [point["kl"] for point in curve]
        axes.axhline(kl[0], color=_SECOND, linestyle="--", linewidth=1.2)
        axes.annotate("before", (steps[-1], kl[0]), (0, -4), textcoords="offset points", ha="right", va="top")
        axes.plot(steps, kl, color=_ACCENT, marker="o", markersize=3.5, linewidth=1.8)
        axes.set_xlabel("step")
        axes.set_ylabel("KL to the teacher (nats)")
        axes.set_ylim(0, max(kl) * 1.1)
        axes.grid(axis="y", linewidth=0.7)
    return out[0]


def positions_svg(rates: Sequence[float]) -> str:
    """Share of the cycles in which the drafted token of each position was accepted."""
    out: list[str] = []
    with _figure(5.2, 3.0, out, "acceptance at each drafted position") as axes:
        axes.bar(range(1, len(rates) + 1), [100 * rate for rate in rates], color=_BAR, width=0.75)
        axes.set_xlabel("drafted position")
        axes.set_ylabel("accepted (% of cycles)")
        axes.set_ylim(0, 100)
        axes.set_xticks(range(1, len(rates) + 1))
        axes.grid(axis="y", linewidth=0.7)
    return out[0]


def histogram_svg(counts: Sequence[int]) -> str:
    """Shares of the accept lengths 1, 2, ...: tokens gained in a cycle; the dashed line is their mean."""
    out: list[str] = []
    with _figure(5.2, 3.0, out, "distribution of accept lengths") as axes:
        lengths, total = range(1, len(counts) + 1), sum(counts)
        shares = [100 * count / total for count in counts]
        mean = sum(length * count for length, count in zip(lengths, counts, strict=True)) / total
        axes.bar(lengths, shares, color=_BAR, width=0.75)
        axes.axvline(mean, color=_SECOND, linestyle="--", linewidth=1.2)
        axes.annotate(f"mean {mean:.2f}", (mean, max(shares)), (5, 0), textcoords="offset points", va="top")
        axes.set_xlabel("tokens gained in a cycle")
        axes.set_ylabel("share (% of cycles)")
        axes.set_xticks(lengths)
        axes.grid(axis="y", linewidth=0.7)
    return out[0]
