"""Canaries: prompts with code words, whose answers are compared with and without load."""

from __future__ import annotations

from loadgen.workloads.canaries import MAX_CANARIES, SAMPLING_FIELDS, build_canaries, canary_request


def test_every_canary_has_its_own_code_word() -> None:
    """No code word is part of the prompt of another canary. The seed decides the code words."""
    canaries = build_canaries(MAX_CANARIES, seed=3)
    assert len({canary.code for canary in canaries}) == MAX_CANARIES
    assert all(canary.code in canary.text for canary in canaries)
    assert not any(other.code in canaries[0].text for other in canaries[1:])
    assert canaries == build_canaries(MAX_CANARIES, seed=3)
    assert canaries != build_canaries(MAX_CANARIES, seed=4)


def test_a_canary_is_decoded_greedily_whatever_the_user_adds() -> None:
    """Fields that make answers random or change their length are left out. Other fields are sent."""
    (canary,) = build_canaries(1, seed=0)
    body = {"chat_template_kwargs": {"thinking": False}} | dict.fromkeys(SAMPLING_FIELDS, 2)
    request = canary_request(canary, 5, body)
    assert request.body == {"chat_template_kwargs": {"thinking": False}}
    assert (request.prompt, request.ignore_eos) == (canary.text, False)
    assert request.id < canary_request(canary, 4, body).id < 0
