"""What `loadgen dissect training` says of a step: measured beside predicted, in plain lines and as a page."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from analysis.dissect import with_margin, wrapped
from analysis.hardware import aligned
from analysis.report.format import count, duration, share, significant, size

if TYPE_CHECKING:
    from analysis.report import Document
    from loadgen.dissect.found import TechniqueFound, TrainingFound

TIME_HEADS = ("technique", "step", "±", "forward", "backward", "optimiser", "collectives", "tokens/s", "predicted")
MEMORY_HEADS = ("technique", "weights", "gradients", "optimiser", "activations", "peak", "predicted", "off")
PARTS_HEADS = ("technique", "part", "measured", "predicted")
MEANING = """Collectives run beside forward and backward and are part of them. Memory is that of one process at the
instant at which it is most, by the allocator's account; activations are all that passes: gathered weights and buffers
too. Predicted: servers.hardware, of the bounds above; memory is counted tensor by tensor, time assumes that kernels
reach the bounds."""


def headings(found: TrainingFound) -> tuple[str, str]:
    """What was measured, and the bounds."""
    allowed = found.bounds
    return (
        f"{found.model}, {found.layers} of {count(found.model_layers, 'layer')} "
        f"({significant(found.parameters / 1e6)} M parameters), {found.dtype}, {found.batch} x {found.sequence} tokens",
        f"{allowed.device}: {significant(allowed.flops_per_s / 1e9)} GFLOP/s, "
        f"{significant(allowed.bytes_per_s / 1e9)} GB/s ({allowed.source})",
    )


def steps_s(each: TechniqueFound) -> list[float]:
    """Whole steps, one per repeat."""
    return [sum(parts) for parts in zip(*each.parts_s.values(), strict=True)]


def off(each: TechniqueFound) -> float:
    """By how much the predicted peak is off the measured one, as a share."""
    return sum(each.predicted_bytes.values()) / sum(each.memory_bytes.values()) - 1


def time_rows(found: TrainingFound) -> list[tuple[str, ...]]:
    """Of each technique that was measured."""
    rows: list[tuple[str, ...]] = []
    for each in _measured(found):
        mean, margin = with_margin(steps_s(each))
        parts = [duration(with_margin(seconds)[0]) for seconds in each.parts_s.values()]
        rows.append(
            (
                *(_named(each), duration(mean), duration(margin, 2), *parts),
                duration(each.communication_s) if each.processes > 1 else "",
                *(significant(found.batch * found.sequence / mean), duration(sum(each.predicted_s.values()))),
            )
        )
    return rows


def memory_rows(found: TrainingFound) -> list[tuple[str, ...]]:
    """At the peak, by kind; by how much the predicted peak is off."""
    return [
        (
            *(_named(each), *(size(held) for held in each.memory_bytes.values())),
            *(size(sum(each.memory_bytes.values())), size(sum(each.predicted_bytes.values()))),
            f"{100 * off(each):+.1f} %",
        )
        for each in _measured(found)
    ]


def parts_rows(found: TrainingFound) -> list[tuple[str, ...]]:
    """Every part of time and kind of memory, measured and predicted."""
    rows: list[tuple[str, ...]] = []
    for each in _measured(found):
        for part, seconds in each.parts_s.items():
            rows.append((each.technique, part, duration(with_margin(seconds)[0]), duration(each.predicted_s[part])))
        for kind, held in each.memory_bytes.items():
            rows.append((each.technique, f"{kind}, bytes", size(held), size(each.predicted_bytes[kind])))
    return rows


def sentences(found: TrainingFound) -> list[str]:
    """What could not be measured, and why; how far the predictions are off."""
    lines = [f"Not here: {each.technique}: {each.cannot}." for each in found.techniques if each.cannot]
    worst = max(_measured(found), key=lambda each: abs(off(each)))
    lines.append(f"The predicted peak of memory is off by at most {share(abs(off(worst)))} ({worst.technique}).")
    return lines


def text(found: TrainingFound) -> str:
    """All of it for a terminal of 80 columns."""
    times = [(*row[:2], *row[3:]) for row in (TIME_HEADS, *time_rows(found))]  # the margin is in JSON and on the page
    short = {
        "optimiser": "optim.",
        "collectives": "coll.",
        "activations": "activ.",
        "gradients": "grads",
        "predicted": "model",
    }
    heads = [tuple(short.get(cell, cell) for cell in row) for row in (times[0], MEMORY_HEADS)]
    blocks = [
        wrapped(headings(found)),
        aligned([heads[0], *times[1:]]),
        aligned([heads[1], *memory_rows(found)]),
        wrapped([*sentences(found), " ".join(MEANING.split())]),
    ]
    return "\n\n".join(blocks)


def document(found: TrainingFound) -> Document:
    """The page: the tables, and everything measured beside everything predicted."""
    from analysis import report as doc
    from analysis.report.tables import numbers, table

    title, bounds = headings(found)
    head: dict[str, doc.Kind] = {"technique": "head"}
    tables = [
        table("Time of one step", head | numbers(*TIME_HEADS[1:]), time_rows(found), several=True, id="time"),
        table("Memory at the peak", head | numbers(*MEMORY_HEADS[1:]), memory_rows(found), several=True, id="memory"),
    ]
    both = table(
        "Model against measurement",
        head | {"part": "text", **numbers(*PARTS_HEADS[2:])},
        parts_rows(found),
        several=True,
    )
    paragraphs = [doc.Paragraph(each) for each in (*sentences(found), MEANING)]
    sections = [
        doc.Section("answer", "A training step", [*tables, *paragraphs]),
        doc.Section("model", "Model against measurement", [both]),
    ]
    data: dict[str, list[str]] = {"runs": [], "charts": []}
    look = [doc.RunLook(title)]
    return doc.Document("loadgen dissect", title, sections, bounds, "", look, [], data, version("llm-loadgen"))


def _measured(found: TrainingFound) -> list[TechniqueFound]:
    return [each for each in found.techniques if not each.cannot]


def _named(each: TechniqueFound) -> str:
    return f"{each.technique} x {each.processes}" if each.processes > 1 else each.technique
