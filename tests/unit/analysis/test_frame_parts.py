"""Parts of a Frame: the requests for each model."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis import build_summary
from loadgen.analysis.frame import Frame, build_frame
from loadgen.analysis.frame_parts import find_part, frame_parts, select_rows
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import parse
from loadgen.analysis.record_groups import RecordGroups
from loadgen.analysis.row_labels import MAX_NAMES, OTHER_NAME, RowLabelsBuilder
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.steady_window import frame_of_run
from tests.support.runs import burst, run_of


def records_of_models() -> list[Record]:
    """Return the records of a burst of 300 requests. Every third request named the model `b`."""
    return [replace(record, model="b" if record.id % 3 == 0 else "") for record in burst(300, chunks=8)]


def test_a_part_has_the_columns_of_its_records() -> None:
    """The Frame of a part equals the Frame that is built from the records of this part alone."""
    records = records_of_models()
    frame = build_frame(records)
    assert frame.models is not None
    part = select_rows(frame, frame.models.rows("b"))
    alone = build_frame([record for record in records if record.model == "b"])
    for name in Frame.__struct_fields__:
        column = getattr(alone, name)
        if isinstance(column, np.ndarray) and name != "outcome_index":
            np.testing.assert_array_equal(getattr(part, name), column, err_msg=name)
    np.testing.assert_array_equal(part.chunk_ns[:], alone.chunk_ns[:])
    assert sum(counted.requests for counted in part.outcomes.values()) == len(alone)
    assert part.span_ns == frame.span_ns != alone.span_ns
    for name in ("ttft_s", "itl_s", "e2e_s"):
        np.testing.assert_array_equal(METRICS[name].values(part), METRICS[name].values(alone))


def test_the_parts_add_up_to_the_run(tmp_path: Path) -> None:
    """Requests, tokens and rates of the models add up to those of the run. The model of the run has its name."""
    run = run_of(tmp_path / "run", records_of_models())
    result = build_summary.summarise(run)
    assert [part.name for part in result.models] == ["Llama-2-7b-chat", "b"]
    for name in ("sent", "complete", "failed"):
        assert sum(getattr(part.requests, name) for part in result.models) == getattr(result.requests, name)
    assert sum(part.prompt_tokens for part in result.models) == result.tokens.prompt_reported
    assert sum(part.output_tokens for part in result.models) == result.tokens.output_reported
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "input_tokens_per_s"):
        total = sum(getattr(part.throughput, name) for part in result.models)
        assert total == pytest.approx(getattr(result.throughput, name))
    assert sum(part.latency.ttft.n for part in result.models) == result.latency.ttft.n


def test_a_run_of_one_model_has_no_parts() -> None:
    """Without a model in any record, there is neither a table nor a column."""
    frame = build_frame(burst(30, chunks=3))
    assert frame.models is None
    assert not [*frame_parts(frame, frame.models)]
    assert find_part(frame, "b") is None


def test_objectives_judge_one_model(tmp_path: Path) -> None:
    """An objective on a model uses the requests of this model alone. It fails if the run has no such model."""
    run = run_of(tmp_path / "run", records_of_models())
    frame = frame_of_run(run)
    result = build_summary.summarise(run, frame)
    objectives = parse(["b: complete >= 100", "b: complete >= 101", "c: ttft.p50 < 1h", "b: e2e.max < 1h"])
    verdicts = judge(objectives, frame, result)
    assert [verdict.verdict for verdict in verdicts] == ["pass", "fail", "fail", "pass"]
    assert verdicts[0].requests == 100
    assert verdicts[3].measured == max(METRICS["e2e_s"].values(frame)[::3])


def test_many_names_are_grouped() -> None:
    """Names beyond the limit share one group, so that no file makes a report of a thousand tables."""
    builder = RowLabelsBuilder()
    for models in (["", ""], [f"model-{number}" for number in range(2 * MAX_NAMES)]):
        builder.extend(RecordGroups([Record(id=0, state="complete", model=model) for model in models]), models)
    labels = builder.labels()
    assert labels is not None
    assert len(labels.names) == MAX_NAMES + 1
    assert labels.names[0] == ""
    assert labels.rows("").sum() == 2
    assert labels.rows(OTHER_NAME).sum() == MAX_NAMES + 1
