"""Checks the options for separate prefill workers (disaggregated serving)."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.errors import PlanError


def refuse_with_prefill_workers(options: Mapping[str, bool]) -> None:
    """Raise PlanError for the first option that is set. The options have no effect with separate prefill workers.

    `options` maps the name of each option to True if the option is set.
    """
    for option, is_set in options.items():
        if is_set:
            raise PlanError(
                f"{option} has no effect with --prefill-workers, which compute prompts separately from decoding",
                "Leave out one of the two options.",
            )


def check_worker_options(prefill_workers: int, decode_workers: int | None, chunked_prefill: str | None) -> None:
    """Raise PlanError if an option of `loadgen simulate` has no effect.

    - `--chunked-prefill` has no effect if there are separate prefill workers.
    - `--decode-workers` has no effect if there are none.
    """
    if prefill_workers:
        refuse_with_prefill_workers({"--chunked-prefill": chunked_prefill is not None})
    elif decode_workers is not None:
        raise PlanError("--decode-workers has no effect without --prefill-workers", "Add --prefill-workers 1 or more.")
