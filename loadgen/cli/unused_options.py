"""Refuses options that have no effect together with the other options of a command."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.errors import PlanError


def refuse_unused(options: Mapping[str, bool], reason: str, hint: str = "Leave out one of the two options.") -> None:
    """Raise PlanError if an option in `options` is set. The message says that this option has no effect.

    `options` maps the name of each option, such as `--rate`, to True if the user has set the option. `reason` completes
    the message: "--rate has no effect" and then the reason.
    """
    for option, is_set in options.items():
        if is_set:
            raise PlanError(f"{option} has no effect {reason}", hint)


def refuse_with_prefill_workers(options: Mapping[str, bool]) -> None:
    """Raise PlanError for the first option that is set. The options have no effect with separate prefill workers.

    `options` maps the name of each option to True if the option is set.
    """
    refuse_unused(options, "with --prefill-workers, which compute prompts separately from decoding")


def check_worker_options(prefill_workers: int, decode_workers: int | None, chunked_prefill: str | None) -> None:
    """Raise PlanError if one of these options of `loadgen simulate` is set, but has no effect.

    - `--chunked-prefill` has an effect only without separate prefill workers.
    - `--decode-workers` has an effect only with separate prefill workers.
    """
    if prefill_workers:
        refuse_with_prefill_workers({"--chunked-prefill": chunked_prefill is not None})
    refuse_unused(
        {"--decode-workers": decode_workers is not None and not prefill_workers},
        "without --prefill-workers",
        "Add --prefill-workers 1 or more.",
    )
