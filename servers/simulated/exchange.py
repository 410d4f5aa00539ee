"""One request for tokens, from its body to the line in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp.web_request import BaseRequest

from servers.simulated.errors import FaultError
from servers.simulated.faults import FAULTS, HEADER, Behaviour, Fault, fault_of, parse_fault
from servers.simulated.ledger import Entry, Ledger
from servers.simulated.stream import Ending, Pump, Stream, reset
from servers.simulated.wire import TEXT_TYPE, Generation, Question, Refused, Reply, Site, Wire

_FIRST_WAIT_S, _WAIT_GROWS, _LONGEST_WAIT_S = 0.1, 1.1, 1.0
"""How LightLLM polls for a free slot (httpserver/manager.py)."""
_HEAD_PIECES = 20
_SLOW_HEAD_MS = 1000
_LIE_BYTES = 1 << 20
_NO_FAULT = Behaviour("")

Head = Callable[[BaseRequest, Reply, int], bytes]


class Exchange:
    """Created when the request's body has been read."""

    def __init__(
        self, site: Site, wire: Wire, pump: Pump, ledger: Ledger, request: BaseRequest, received_ns: int, head: Head
    ) -> None:
        self._site = site
        self._wire = wire
        self._pump = pump
        self._ledger = ledger
        self._request = request
        self._received_ns = received_ns
        self._head = head
        self._transport = transport_of(request)
        self._fault: Fault | None = None

    async def run(self, index: int, body: Mapping[str, Any]) -> Reply | bool:
        """The whole exchange. Returns an answer that is still to be written, or whether the connection can go on."""
        self._fault = self._choose_fault(index)
        behaviour = self._behaviour()
        if behaviour.refuses:
            self._refused("refused")
            reset(self._transport)
            return False
        if behaviour.status is not None:
            self._refused("failed")
            return self._wire.failure(behaviour.status)
        generation = self._generation(index, body)
        stream = Stream(generation, self._transport, await self._admission(generation))
        if behaviour.detour is not None and self._fault:
            at = self._fault.at
            stream.detour = behaviour.detour(generation.output_tokens // 2 if at is None else at)
        return await self._answer(stream, behaviour)

    def _choose_fault(self, index: int) -> Fault | None:
        """The client's own wish, or what the rules say."""
        wish = self._request.headers.get(HEADER)
        if wish is None:
            return fault_of(self._site.config.faults, self._site.config.seed, index)
        try:
            return parse_fault(wish)
        except FaultError as problem:
            raise Refused(Reply(str(problem).encode(), 400, TEXT_TYPE)) from None

    def _behaviour(self) -> Behaviour:
        return FAULTS[self._fault.name] if self._fault else _NO_FAULT

    def _generation(self, index: int, body: Mapping[str, Any]) -> Generation:
        """Raises Refused with the server's own words when the request is not one it would take."""
        make = self._wire.generate[self._request.path]
        question = Question(index, body, int(time.time()), stop_after=None)
        try:
            generation = make(self._site, question)
        except Refused:
            self._refused("validation")
            raise
        if self._behaviour().stops_early and self._fault:
            at = self._fault.at or max(1, generation.asked_tokens // 2)
            return make(self._site, replace(question, stop_after=at))
        if self._behaviour().role_first:
            return replace(generation, opening=())
        return generation

    async def _admission(self, generation: Generation) -> int:
        """Waits for a place or raises Refused, as the server does. Returns the instant from which tokens count."""
        site, wire = self._site, self._wire
        limit = site.config.max_concurrent_requests or wire.default_limit
        arrived_ns, wait_s = self._received_ns, _FIRST_WAIT_S
        while limit is not None and len(site.streams) >= limit:
            if wire.overloaded is not None:
                self._refused("overloaded")
                raise Refused(wire.overloaded(generation))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * _WAIT_GROWS, _LONGEST_WAIT_S)
            arrived_ns = time.monotonic_ns()
        return arrived_ns

    async def _answer(self, stream: Stream, behaviour: Behaviour) -> Reply | bool:
        site = self._site
        site.metrics.accept()
        site.streams.add(stream)
        try:
            if stream.generation.streamed:
                await self._begin(stream, behaviour)
            self._pump.submit(stream)
            ending = await stream.finished
            if not stream.generation.streamed:
                return await self._whole(stream, behaviour, ending)
            if behaviour.lying_length:
                self._transport.close()
            return not behaviour.lying_length and ending in ("complete", "truncated", "failed")
        except OSError:  # the client has gone before its answer began
            return False
        finally:
            site.streams.discard(stream)
            self._pump.cancel(stream)
            self._account(stream)

    async def _begin(self, stream: Stream, behaviour: Behaviour) -> None:
        """Sends the response's head. Real servers send it at once, long before the first token."""
        generation = stream.generation
        stream.chunked = not behaviour.lying_length
        reply = Reply(headers=self._wire.stream_headers + generation.head, chunked=stream.chunked)
        await self._send_head(stream, self._head(self._request, reply, _LIE_BYTES), behaviour)
        if behaviour.role_first and generation.role_only:
            stream.send(stream.framed(list(generation.role_only)))

    async def _send_head(self, stream: Stream, head: bytes, behaviour: Behaviour) -> None:
        if not behaviour.slow_head or not self._fault:
            stream.send(head)
            return
        whole_ms = _SLOW_HEAD_MS if self._fault.at is None else self._fault.at
        step = -(-len(head) // _HEAD_PIECES)
        for start in range(0, len(head), step):
            stream.send(head[start : start + step])
            await asyncio.sleep(whole_ms / 1e3 / _HEAD_PIECES)
        stream.job.arrived_ns = time.monotonic_ns()

    async def _whole(self, stream: Stream, behaviour: Behaviour, ending: Ending) -> Reply | bool:
        """The answer of a request that is not streamed, once its last token is due."""
        if ending in ("reset", "cut", "stall"):
            return False
        if ending == "failed":
            return self._wire.failure(500)
        total_s = (time.monotonic_ns() - self._received_ns) / 1e9
        reply = stream.generation.answer(total_s)
        length, body = len(reply.body), reply.body
        if behaviour.breaks_json:
            length, body = length // 2, body[: length // 2]
        elif behaviour.lying_length:
            length += _LIE_BYTES
        elif ending == "truncated":
            body = body[: length // 2]
        await self._send_head(stream, self._head(self._request, reply, length), behaviour)
        sent_ns = time.monotonic_ns()
        stream.send(body)
        stream.due_ns.append(stream.held_due_ns)
        stream.sent_ns.append(sent_ns)
        stream.tokens.append(stream.count)
        self._pump.lateness.add(sent_ns - stream.held_due_ns)
        if len(body) < length:
            self._transport.close()
            return False
        return True

    def _refused(self, kind: str) -> None:
        self._site.metrics.refuse(kind)
        self._account(None)

    def _account(self, stream: Stream | None) -> None:
        ended_ns = time.monotonic_ns()
        self._ledger.add(
            Entry(
                request_id=self._request.headers.get("X-Request-Id", "").encode("utf-8", "replace").decode(),
                fault=self._fault.name if self._fault else "",
                received_ns=self._received_ns,
                ended_ns=ended_ns,
                realtime_offset_ns=time.time_ns() - ended_ns,
                stream=stream,
            )
        )


def transport_of(request: BaseRequest) -> asyncio.Transport:
    """The request's connection. Raises ConnectionResetError when it is gone."""
    if request.transport is None:
        raise ConnectionResetError
    return request.transport
