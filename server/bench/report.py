"""Results of the load as a table for people and as plain values for JSON."""

from collections.abc import Sequence

from server.bench.run import Measurement

HEADER = (
    "server",
    "concurrency",
    "output tok/s",
    "requests/s",
    "TTFT ms",
    "p95",
    "TPOT ms",
    "p95",
    "errors",
    "ratio",
)
SHOWN_ERRORS = 3


def _ratio(measurement: Measurement, measurements: Sequence[Measurement]) -> float | None:
    """Output tokens per second over those of the first server at the same concurrency; None without anything
    to compare."""
    row = [other for other in measurements if other.concurrency == measurement.concurrency]
    base = row[0].output_tokens_per_second
    return measurement.output_tokens_per_second / base if len(row) > 1 and base > 0 else None


def result_values(measurements: Sequence[Measurement]) -> list[dict[str, object]]:
    return [
        {
            "server": measurement.target.name,
            "url": measurement.target.url,
            "model": measurement.model,
            "concurrency": measurement.concurrency,
            "requests": len(measurement.results),
            "succeeded": len(measurement.succeeded),
            "wall_seconds": round(measurement.wall_seconds, 3),
            "output_tokens_per_second": round(measurement.output_tokens_per_second, 2),
            "total_tokens_per_second": round(
                measurement.output_tokens_per_second
                + measurement.prompt_tokens * measurement.requests_per_second,
                2,
            ),
            "requests_per_second": round(measurement.requests_per_second, 3),
            "ttft_ms": _pair(measurement.ttft_ms()),
            "tpot_ms": _pair(measurement.tpot_ms()),
            "outside_model": None
            if measurement.outside_model is None
            else round(measurement.outside_model, 4),
            "ratio": _ratio(measurement, measurements),
            "errors": measurement.errors[:SHOWN_ERRORS],
        }
        for measurement in measurements
    ]


def _pair(values: tuple[float, float] | None) -> dict[str, float] | None:
    return None if values is None else {"median": round(values[0], 2), "p95": round(values[1], 2)}


def render_table(measurements: Sequence[Measurement]) -> str:
    rows = [HEADER]
    for measurement in measurements:
        ttft, tpot, ratio = measurement.ttft_ms(), measurement.tpot_ms(), _ratio(measurement, measurements)
        rows.append(
            (
                measurement.target.name,
                str(measurement.concurrency),
                f"{measurement.output_tokens_per_second:.1f}",
                f"{measurement.requests_per_second:.2f}",
                *(f"{value:.1f}" for value in ttft or ()),
                *(("-", "-") if ttft is None else ()),
                *(f"{value:.2f}" for value in tpot or ()),
                *(("-", "-") if tpot is None else ()),
                str(measurement.num_errors),
                "-" if ratio is None else f"{ratio:.2f}x",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    for measurement in measurements:
        if measurement.outside_model is not None:
            name, share = measurement.target.name, measurement.outside_model
            lines.append(
                f"{name}: at concurrency {measurement.concurrency}, {share:.1%} of the time outside "
                "the model's steps"
            )
        lines += [f"{measurement.target.name}: {error}" for error in measurement.errors[:SHOWN_ERRORS]]
    return "\n".join(lines)
